(function () {
  "use strict";
  const root = document.documentElement;
  const main = document.querySelector("main");
  const views = {};
  let content = JSON.parse(document.getElementById("content").textContent);
  let drawing = 0;

  // ---------------------------------------------------------------- light and dark

  const theme = document.getElementById("theme");
  const asked = window.matchMedia("(prefers-color-scheme: dark)");

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : asked.matches;
  }

  function nameTheme() {
    theme.textContent = isDark() ? "Light" : "Dark";
  }

  function remembered(value) {
    try { // a browser may refuse to keep anything for a file
      if (value) localStorage.setItem("ecc-theme", value);
      return localStorage.getItem("ecc-theme");
    } catch (error) {
      return null;
    }
  }

  const before = remembered();
  if (before === "light" || before === "dark") root.dataset.theme = before;
  nameTheme();
  asked.addEventListener("change", nameTheme);
  theme.addEventListener("click", function () {
    root.dataset.theme = isDark() ? "light" : "dark";
    remembered(root.dataset.theme);
    nameTheme();
  });

  // ---------------------------------------------------------------- figures and their filters

  const state = { hidden: [], when: "after", budget: undefined };

  async function draw() {
    const turn = ++drawing;
    for (const place of main.querySelectorAll(".plot")) {
      const name = place.dataset.figure;
      const spec = content.figures[name];
      try {
        const made = await window.vegaEmbed(place, spec, {
          actions: false, ast: true, renderer: "svg", logLevel: 1, tooltip: { theme: "ecc", offsetY: 14 },
        });
        if (turn !== drawing) { made.finalize(); return; }
        views[name] = made.view;
      } catch (error) {
        console.error(name + ": " + error);
        place.textContent = "This figure could not be drawn.";
      }
    }
    await choose();
    root.dataset.drawn = String(turn);
  }

  function readState() {
    const form = main.querySelector(".controls");
    if (!form) return;
    state.hidden = [...form.querySelectorAll("input[name=method]:not(:checked)")].map((input) => input.value);
    state.when = form.querySelector("input[name=when]:checked").value;
    const budget = form.querySelector("input[name=budget]:checked");
    state.budget = budget ? budget.value : undefined;
  }

  function writeState() {
    const form = main.querySelector(".controls");
    if (!form) return;
    for (const input of form.querySelectorAll("input")) {
      if (input.name === "method") input.checked = !state.hidden.includes(input.value);
      else if (state[input.name] !== undefined) input.checked = input.value === state[input.name];
    }
  }

  async function choose() {
    readState();
    main.dataset.when = state.when;
    for (const row of main.querySelectorAll("tr[data-method]")) {
      row.hidden = state.hidden.includes(row.dataset.method);
    }
    for (const view of Object.values(views)) {
      view.signal("hidden", state.hidden).signal("when", state.when);
      if (state.budget !== undefined) view.signal("budget", state.budget);
      await view.runAsync();
    }
    root.dataset.chosen = JSON.stringify(state);
  }

  main.addEventListener("change", function (event) {
    if (event.target.closest(".controls")) choose();
  });

  // ---------------------------------------------------------------- copying and saving

  function save(name, text, kind) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind }));
    link.download = name;
    link.click();
    URL.revokeObjectURL(link.href);
  }

  main.addEventListener("click", async function (event) {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.classList.contains("copy")) {
      try {
        await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
        button.textContent = "Copied";
      } catch (error) { // a page from a file may not be allowed to: then it is marked for the reader to copy
        getSelection().selectAllChildren(button.parentElement.querySelector("code"));
      }
    } else if (button.dataset.save) {
      const colours = getComputedStyle(root);
      const svg = await views[button.dataset.save].toSVG();
      const plain = svg.replace(/var\((--[\w-]+)\)/g, (whole, name) => colours.getPropertyValue(name).trim());
      save(button.dataset.save + ".svg", plain, "image/svg+xml");
    } else if (button.id === "save-facts") {
      save("facts.json", JSON.stringify(content.facts, null, 1), "application/json");
    }
  });

  // Figures are as wide as the screen; a sheet is narrower, and a figure that is merely shrunk cannot be read.
  function setWidths(widthOf) {
    for (const place of main.querySelectorAll(".plot")) {
      const view = views[place.dataset.figure];
      if (view) view.signal("width", widthOf(place)).run();
    }
  }
  window.addEventListener("beforeprint", function () { setWidths((place) => (place.closest(".pair") ? 320 : 660)); });
  window.addEventListener("afterprint", function () { setWidths((place) => place.clientWidth); });

  // ---------------------------------------------------------------- while a run goes on

  const live = document.getElementById("live");
  let seen = "";

  async function ask() {
    try {
      const answer = await fetch("content.json", { cache: "no-store", headers: { "If-None-Match": seen } });
      if (answer.status === 200) {
        const news = await answer.json();
        if (seen) {
          const open = [...main.querySelectorAll("details[open] > summary")].map((one) => one.parentElement.parentElement.id);
          content = news;
          for (const view of Object.values(views)) view.finalize();
          for (const name of Object.keys(views)) delete views[name];
          main.innerHTML = news.body;
          for (const id of open) {
            const again = main.querySelector("#" + CSS.escape(id) + " details");
            if (again) again.open = true;
          }
          writeState();
          await draw();
        }
        seen = answer.headers.get("ETag") || "";
      }
      if (answer.status === 503) live.textContent = (await answer.json()).error;
      else live.textContent = content.facts.running ? "live" : "finished";
    } catch (error) {
      live.textContent = "the server has stopped";
    }
    setTimeout(ask, 2000);
  }

  window.ecc = { views: views };
  draw().then(function () { if (root.hasAttribute("data-live")) ask(); });
})();
