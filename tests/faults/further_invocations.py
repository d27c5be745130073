"""As `invocations.py`, of what reads data sets, recipes and runs."""

from __future__ import annotations

Table = dict[str, tuple[str, str]]
HUGE = "9" * 30

I = "inspect resnet20 --no-verify"  # noqa: E741 - short, as the letters in `invocations.py`
DATA: Table = {
    "data not there": (f"{I} --data none", "there is no folder 'none' of data"),
    "data in a file": (f"{I} --data net.py", "there is no folder 'net.py' of data"),
    "folder without data": (f"{I} --data folder.py", "has none of the layouts that are known"),
    "data of pixels for a classifier": (f"{I} --data scenes", "has labels of pixels"),
    "data of classes for pixels": ("inspect erfnet --data photos", "has labels of whole images"),
    "data for digits": ("inspect digits --data photos", "task 'digits' takes no data"),
    "data for a task of mine": ("inspect net.py:build --data photos", "takes no data"),
    "data for an unknown task": ("inspect resnet21 --data photos", "did you mean 'resnet20'?"),
    "classes that differ": (f"{I} --data differing", "lacks the class folder"),
    "classes without photos": (f"{I} --data vacant", "holds no photos"),
    "a set without photos to judge by": (f"{I} --data unjudged", "neither val nor test"),
    "scene without its labels": ("inspect erfnet --data unlabelled", "is missing, the label map"),
    "scenes that cannot be read": ("inspect erfnet --data garbled", "cannot be decoded"),
    "records cut off": (f"{I} --data short", "not a whole number of records"),
    "weights not there": (f"{I} --weights none.safetensors", "cannot read none.safetensors"),
    "weights in a folder": (f"{I} --weights .", "cannot read ."),
    "weights of text": (f"{I} --weights net.py", "is cut off or no safetensors file"),
    "weights of nothing": (f"{I} --weights empty", "is cut off or no safetensors file"),
    "weights of another network": (f"{I} --weights other.safetensors", "weights of another network"),
    "weights from a device": (f"{I} --weights /dev/zero", "is not a plain file"),
    "weights for a task of mine": ("inspect net.py:build --weights other.safetensors", "takes no weights"),
    "size in words": (f"{I} --size large", "size 'large' cannot be read"),
    "size of nothing": (f"{I} --size 0", "size '0' cannot be read"),
    "negative size": (f"{I} --size=-32", "size '-32' cannot be read"),
    "size of three": (f"{I} --size 3x4x5", "size '3x4x5' cannot be read"),
    "size beyond memory": (f"{I} --size 99999", "sides may have 8192 pixels at most"),
    "size beyond counting": (f"{I} --size {HUGE}", "cannot be read"),
    "size below the network's": (f"{I} --size 4", "sides must have at least 8"),
    "size between the steps": ("inspect erfnet --size 20x32", "multiples of 8"),
    "size for a task of mine": ("inspect net.py:build --size 32", "takes no size"),
    "size to profile": (
        "profile resnet20 --meter platform:jetson-tx2 --size many -o new",
        "size 'many' cannot be read",
    ),
}

D = "compress resnet20 --data cifar --energy net.json --meter none --budget 60% -o new"
TRAINING_DATA: Table = {
    "batch size of nothing": (f"{D} --batch-size 0", "batch size 0 is outside 1..1048576"),
    "negative batch size": (f"{D} --batch-size -8", "batch size -8 is outside"),
    "batch size in words": (f"{D} --batch-size big", "--batch-size"),
    "batch size beyond memory": (f"{D} --batch-size {HUGE}", "is outside 1..1048576"),
    "batch size for a task of mine": (
        f"{D.replace('resnet20 --data cifar', 'net.py:task')} --batch-size 4",
        "takes no batch",
    ),
    "network without data": (f"{D.replace(' --data cifar', '')}", "has no train_batches and loss"),
    "model of another network for data": (D, "belongs to"),
}

R = "--energy net.json --meter none -o new"
RECIPES: Table = {
    "recipe not there": (f"compare none.toml {R}", "cannot read none.toml"),
    "recipe in a folder": (f"compare folder.toml {R}", "cannot read folder.toml"),
    "recipe of other words": (f"compare text.toml {R}", "text.toml is no TOML"),
    "recipe of bytes": (f"compare bytes.toml {R}", "bytes.toml is no TOML"),
    "recipe without a task": (f"compare idle.toml {R}", "has no key task"),
    "recipe of an unknown task": (f"compare unknown.toml {R}", "did you mean 'resnet20'?"),
    "recipe with a slip": (f"compare slip.toml {R}", "has the key settings.step, which is unknown"),
    "recipe without data": (f"compare lacking.toml {R}", "there is no folder 'none' of data"),
    "recipe that names code": (f"compare code.toml {R}", "which would be run"),
    "recipe that names a program": (f"compare program.toml {R}", "give it as --meter"),
    "recipe beyond counting": (f"compare many.toml {R}", "seeds"),
    "recipe to compress by": (
        "compress slip.toml --energy net.json --budget 60% -o new",
        "is a recipe, which `ecc compare` takes",
    ),
    "unknown place": (f"compare net.py:task {R} --on moon", "--on moon is unknown"),
}

E = "export run --task net.py:task"
EXPORT: Table = {
    "nothing to export": ("export", "Missing argument 'RUN'"),
    "run not there": ("export none", "cannot read none/summary.json"),
    "file for a run": ("export net.py", "cannot read net.py/summary.json"),
    "folder that is no run": ("export photos", "Give the folder of a finished run"),
    "run of a task that is not bundled": ("export run", "name it again: --task file.py:function"),
    "another task": ("export run --task digits", "compressed the task 'toy', and this is 'digits'"),
    "another network of that name": ("export run --task net.py:other", "belongs to another network"),
    "unknown task to export": ("export run --task digit", "did you mean 'digits'?"),
    "unknown format": (f"{E} --format tflite", "format 'tflite' is unknown; there are safetensors"),
    "no format": (f"{E} --format ''", "format '' is unknown"),
    "integers without ONNX": (f"{E} --int8 dynamic", "ask for --format onnx as well"),
    "unknown integers": (f"{E} --format onnx --int8 tiny", "tiny"),
    "integers without batches": ("export run --task net.py:toy --format onnx --int8 static", "train_batches"),
    "export into a file": (f"{E} -o net.py", "cannot write into net.py"),
    "export below a file": (f"{E} -o net.py/out", "cannot write into net.py/out"),
    "export over another file": (f"{E} -o taken", "is there and differs; give --force"),
    "export over a folder": (f"{E} -o blocked --force", "blocked/slim.safetensors is there and is no file"),
    "export into a long name": (f"{E} -o {'a' * 300}", "File name too long"),
    "run with a damaged summary": ("export damaged --task net.py:task", "damaged"),
    "run that is not finished": ("export begun --task net.py:task", "cannot read begun/summary.json"),
    "two runs": ("export run run", "run"),
}

REPORT: Table = {
    "nothing to report": ("report", "Missing argument 'RUN'"),
    "report of what is not there": ("report none -o new", "none is no folder"),
    "report of a file": ("report net.py -o new", "net.py is no folder"),
    "report of another folder": ("report photos -o new", "holds neither a run nor a grid"),
    "report of a grid without runs": ("report blank -o new", "is a grid without any run yet"),
    "report of a damaged run": ("report damaged -o new", "summary.json is damaged"),
    "page nowhere": ("report run", "say where the page goes"),
    "page into a folder": ("report run -o .", "cannot write ."),
    "page into a folder not there": ("report run -o none/page.html", "cannot write none/page.html"),
    "page into a long name": (f"report run -o {'a' * 300}", "File name too long"),
    "figures of a report into a file": ("report run --figures net.py", "cannot make the folder net.py"),
    "live and written": ("report run --live -o new", "--live serves the page and writes nothing"),
    "port beyond": ("report run --live --port 99999", "cannot serve on port 99999"),
    "negative port": ("report run --live --port -1", "cannot serve on port -1"),
    "port in words": ("report run --live --port http", "--port"),
}

PIPES: Table = {  # a reader would wait for ever, and root would put a file in the place of a device
    "graph into a pipe": ("inspect net.py:build -o pipe", "cannot write pipe: it is not a plain file"),
    "profile into a pipe": (
        "profile net.py:build --meter platform:jetson-tx2 --samples 12 -o pipe",
        "not a plain file",
    ),
    "model into a pipe": ("fit digits.profile -o pipe", "cannot write pipe: it is not a plain file"),
    "merge into a pipe": ("merge net.profile net2.profile -o pipe", "exists already, and is left as it is"),
    "page into a pipe": ("report run -o pipe", "cannot write pipe: it is not a plain file"),
    "page through a link into a pipe": ("report run -o link", "cannot write link: it is not a plain file"),
    "export into a pipe": ("export run --task net.py:task -o pipe", "cannot write into pipe"),
    "run in a pipe": (D.replace("-o new", "-o pipe"), "belongs to"),
    "data in a pipe": ("inspect resnet20 --data pipe", "there is no folder 'pipe' of data"),
    "weights from a pipe": ("inspect resnet20 --weights pipe", "pipe is not a plain file"),
    "recipe from a pipe": (f"compare pipe.toml {R}", "pipe.toml is not a plain file"),
    "photos from a pipe": ("inspect erfnet --data piped", "it is not a plain file"),
}

TABLE: Table = {**DATA, **TRAINING_DATA, **RECIPES, **EXPORT, **REPORT, **PIPES}
