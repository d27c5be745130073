"""Wrong invocations of every verb: what is wrong, the words after `ecc`, and a part of the message."""

from __future__ import annotations

Table = dict[str, tuple[str, str]]

P = "profile net.py:build --meter platform:jetson-tx2 --samples 12 -o new.profile"
C = "compress net.py:task --energy net.json --meter none --prune-steps 3 --finetune-steps 0 -o new"
K = f"{C} --budget 80%"
T = "--energy net.json --meter none --prune-steps 3 --finetune-steps 2 --budget 80% -o new"
G = "compare net.py:task --energy net.json --meter none -o new"
R = "--energy net.json --meter none -o new"
E = "export run --task net.py:task"

TABLE: Table = {
    # the command line
    "unknown verb": ("inspekt", "did you mean inspect?"),
    "unknown option": ("compress net.py:task --buget 50%", "did you mean --budget?"),
    "missing argument": ("inspect", "TASK"),
    "missing option": ("profile net.py:build", "--output"),
    "value of another type": (f"{K} --prune-steps many", "--prune-steps"),
    "value out of range": (f"{K} --kd-weight 3", "--kd-weight"),
    "unknown choice": (f"{K} --importance norm", "taylor"),
    "NaN": (f"{K} --lr nan", "lr"),
    # tasks
    "unknown task": ("inspect mobilnet_v1", "did you mean 'mobilenet_v1'?"),
    "missing file": ("inspect none.py:build", "none.py"),
    "missing function": ("inspect net.py:bild", "did you mean 'build'?"),
    "function that raises": ("inspect net.py:raises", "ValueError at net.py"),
    "function that returns a number": ("inspect net.py:wrong", "returned int"),
    "syntax error in the file": ("inspect broken.py:build", "SyntaxError"),
    "input that does not fit the network": ("inspect net.py:misfit", "to have 3 channels"),
    "unknown module to freeze": ("inspect net.py:build --freeze nothing.*", "nothing.*"),
    "size that is not a size": ("inspect resnet20 --image-size large", "large"),
    "missing data folder": ("inspect resnet20 --data none", "'none'"),
    "data for a task that takes none": ("inspect net.py:build --data photos", "takes no data"),
    "weights of another network": ("inspect resnet20 --weights other.safetensors", "another network"),
    "weights from a pipe": ("inspect resnet20 --weights pipe", "pipe"),
    # files that must not be overwritten or read
    "graph over a profile": ("inspect net.py:build -o digits.profile", "digits.profile"),
    "graph into a pipe": ("inspect net.py:build -o pipe", "not a regular file"),
    "profile over another file": (f"{P} -o net.py", "net.py"),
    "profile of another network": (f"{P} -o digits.profile --samples 5", "digits.profile"),
    "missing profile": ("fit none.profile", "none.profile"),
    "model instead of a profile": ("fit energy.json", "energy.json"),
    "truncated profile": ("fit torn.profile.gz", "torn.profile.gz"),
    "model over its profile": ("fit digits.profile -o digits.profile", "digits.profile"),
    "merge of two networks": ("merge digits.profile net.profile -o all", "merge"),
    # meters
    "unknown meter": ("doctor --quick --meter sundial", "sundial"),
    "unknown platform": ("doctor --quick --meter platform:jetson-tx1", "did you mean 'jetson-tx2'?"),
    "program that fails": ("doctor --quick --meter command:false", "exit code 1"),
    "runner of a platform": (f"{P} --runner eager", "runner"),
    "meter of another device": (f"{K} --meter platform:eyeriss", "Jetson TX2"),
    # budgets
    "no budget": (C, "--budget"),
    "budget of words": (f"{C} --budget sixty", "sixty"),
    "budget of another unit": (f"{C} --budget 5kg", "kg"),
    "budget above 100 %": (f"{C} --budget 150%", "150"),
    "budget out of reach": (f"{C} --budget 1%", "this network"),
    "two budgets on energy": (f"{C} --budget 50% --budget 9mJ", "energy"),
    "latency without its model": (f"{C} --budget latency=1ms", "latency"),
    "budget on another resource than the model": ("fit digits.profile --budget params=2M", "params"),
    # compress and compare
    "model of another network": (f"{K} --energy digits.json".replace("--energy net.json ", ""), "network"),
    "options without effect together": (f"{K} --unstructured", "--energy"),
    "temperature without distillation": (f"{K} --kd-weight 0 --kd-temperature 2", "--kd-temperature"),
    "unknown device": (f"{K} --device abacus", "device 'abacus' cannot be used"),
    "run folder of something else": (f"{K} -o .", "."),
    "run folder that is a file": (f"{K} -o net.py", "net.py"),
    "task that cannot be trained": (f"compress net.py:build {T}", "train_batches"),
    "batches that are not pairs": (f"compress net.py:no_pairs {T}", "give pairs"),
    "label out of range": (f"compress net.py:labels {T}", "out of bounds"),
    "loss that is infinite": (f"compress net.py:infinite {T}", "finite"),
    "weights with NaN": (f"compress net.py:nan {T}", "NaN"),
    "score that raises": (f"compress net.py:judge {T}", "ZeroDivisionError"),
    "method without held-out data": (f"compress net.py:unjudged {T} --method netadapt", "evaluate_held_out"),
    "unknown method": (f"{G} --methods magic", "magic"),
    "comparison in a folder of something else": (f"{G} -o . --methods ecc", "."),
    # recipes
    "recipe that is not TOML": (f"compare text.toml {R}", "text.toml"),
    "recipe with an unknown setting": (f"compare slip.toml {R}", "did you mean"),
    "recipe that names code": (f"compare code.toml {R}", "code.toml"),
    "recipe that names a program": (f"compress program.toml --budget 50% {R}", "--meter"),
    "config from a pipe": (f"{K} --config pipe.toml", "pipe.toml"),
    # export and report
    "run that does not exist": ("export none", "none"),
    "run of another task": ("export run --task digits", "'digits'"),
    "run of another network": ("export run --task net.py:other", "network"),
    "unknown format": (f"{E} --format tflite", "tflite"),
    "export over another file": (f"{E} -o taken", "--force"),
    "damaged summary": ("export damaged --task net.py:task", "summary.json"),
    "report of another folder": ("report photos", "photos"),
    "report of a damaged run": ("report damaged", "summary.json"),
    "report into a pipe": ("report run -o pipe", "not a regular file"),
    "live report into a file": ("report run --live -o new", "--live"),
}
