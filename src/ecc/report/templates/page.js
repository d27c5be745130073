(function () {
  "use strict";
  const root = document.documentElement;
  const main = document.querySelector("main");
  const views = {};
  let content = JSON.parse(document.getElementById("content").textContent);
  let drawing = 0;

  // ---------------------------------------------------------------- light and dark

  const theme = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  }

  function labelTheme() {
    theme.textContent = isDark() ? "Light" : "Dark";
  }

  function storedTheme(value) {
    try { // storage may be disabled for files
      if (value) localStorage.setItem("ecc-theme", value);
      return localStorage.getItem("ecc-theme");
    } catch (error) {
      return null;
    }
  }

  const before = storedTheme();
  if (before === "light" || before === "dark") root.dataset.theme = before;
  labelTheme();
  system.addEventListener("change", labelTheme);
  theme.addEventListener("click", function () {
    root.dataset.theme = isDark() ? "light" : "dark";
    storedTheme(root.dataset.theme);
    labelTheme();
  });

  // ---------------------------------------------------------------- figures and controls

  const state = { hidden: [], score: "finetuned", budget: undefined };

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
    await applyControls();
    showHints();
    root.dataset.drawn = String(turn);
  }

  function readControls() {
    const form = main.querySelector(".controls");
    if (!form) return;
    state.hidden = [...form.querySelectorAll("input[name=method]:not(:checked)")].map((input) => input.value);
    state.score = form.querySelector("input[name=score]:checked").value;
    const budget = form.querySelector("input[name=budget]:checked");
    state.budget = budget ? budget.value : undefined;
  }

  function writeControls() {
    const form = main.querySelector(".controls");
    if (!form) return;
    for (const input of form.querySelectorAll("input")) {
      if (input.name === "method") input.checked = !state.hidden.includes(input.value);
      else if (state[input.name] !== undefined) input.checked = input.value === state[input.name];
    }
  }

  async function applyControls() {
    readControls();
    main.dataset.score = state.score;
    for (const row of main.querySelectorAll("tr[data-method]")) {
      row.hidden = state.hidden.includes(row.dataset.method);
    }
    for (const view of Object.values(views)) {
      view.signal("hidden", state.hidden).signal("score", state.score);
      if (state.budget !== undefined) view.signal("budget", state.budget);
      await view.runAsync();
    }
    root.dataset.chosen = JSON.stringify(state);
  }

  main.addEventListener("change", function (event) {
    if (event.target.closest(".controls")) applyControls();
    if (event.target.name === "order") sortLayers(event.target.value);
  });

  // ---------------------------------------------------------------- tables

  function sortLayers(key) {
    const body = main.querySelector("tr.layer").parentElement;
    const blocks = [];
    for (const row of body.rows) {
      if (row.classList.contains("layer")) blocks.push([row]);
      else blocks[blocks.length - 1].push(row);
    }
    const sign = key === "network" ? 1 : -1;
    blocks.sort((one, other) => sign * (one[0].dataset[key] - other[0].dataset[key]));
    body.append(...blocks.flat());
  }

  function toggleParts(button) {
    const isOpen = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(isOpen));
    for (let row = button.closest("tr").nextElementSibling; row && row.classList.contains("part"); row = row.nextElementSibling) {
      row.hidden = !isOpen;
    }
  }

  function showHints() {
    for (const hint of main.querySelectorAll(".hint")) {
      const table = hint.nextElementSibling;
      hint.hidden = table.scrollWidth <= table.clientWidth + 1;
    }
  }

  window.addEventListener("resize", showHints);
  main.addEventListener("toggle", function () { // a figure in closed details has no width
    window.dispatchEvent(new Event("resize"));
  }, true);

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
    if (button.classList.contains("fold")) toggleParts(button);
    else if (button.classList.contains("copy")) {
      try {
        await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
        button.textContent = "Copied";
      } catch (error) { // no clipboard access: select the command instead
        getSelection().selectAllChildren(button.parentElement.querySelector("code"));
      }
    } else if (button.dataset.save) {
      const colours = getComputedStyle(root);
      const svg = await views[button.dataset.save].toSVG();
      const plain = svg.replace(/var\((--[\w-]+)\)/g, (whole, name) => colours.getPropertyValue(name).trim());
      save(button.dataset.save + ".svg", plain, "image/svg+xml");
    } else if (button.id === "save-data") {
      save("report.json", JSON.stringify(content.data, null, 1), "application/json");
    }
  });

  // Figures are as wide as the screen. A sheet of paper is narrower, so they are drawn again for it.
  function setWidths(widthOf) {
    for (const place of main.querySelectorAll(".plot")) {
      const view = views[place.dataset.figure];
      if (view) view.signal("width", widthOf(place)).run();
    }
  }
  window.addEventListener("beforeprint", function () { setWidths((place) => (place.closest(".pair") ? 320 : 660)); });
  window.addEventListener("afterprint", function () { setWidths((place) => place.clientWidth); });

  // ---------------------------------------------------------------- live updates

  const live = document.getElementById("live");
  let seen = "";

  async function poll() {
    try {
      const response = await fetch("content.json", { cache: "no-store", headers: { "If-None-Match": seen } });
      if (response.status === 200) {
        const update = await response.json();
        if (seen) {
          const open = [...main.querySelectorAll("details[open] > summary")].map((one) => one.parentElement.parentElement.id);
          content = update;
          for (const view of Object.values(views)) view.finalize();
          for (const name of Object.keys(views)) delete views[name];
          main.innerHTML = update.body;
          for (const id of open) {
            const again = main.querySelector("#" + CSS.escape(id) + " details");
            if (again) again.open = true;
          }
          writeControls();
          await draw();
        }
        seen = response.headers.get("ETag") || "";
      }
      if (response.status === 503) live.textContent = (await response.json()).error;
      else live.textContent = content.data.running ? "live" : "finished";
    } catch (error) {
      live.textContent = "the server was stopped";
    }
    setTimeout(poll, 2000);
  }

  window.ecc = { views: views };
  draw().then(function () { if (root.hasAttribute("data-live")) poll(); });
})();
