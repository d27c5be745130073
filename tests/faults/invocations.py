"""Wrong invocations of every verb, each with a part of the one line that must come back."""

from __future__ import annotations

Table = dict[str, tuple[str, str]]
"""What is wrong: (the words after `ecc`, a part of the message)."""

NET = """
import torch
import torch.nn.functional as F
from torch import nn
from ecc import Task


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 12, 1), nn.ReLU(), nn.Conv2d(12, 4, 1),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten())


def batches(epoch):
    for _ in range(3):
        yield torch.randn(4, 3, 6, 6), torch.randint(0, 4, (4,))


def task(**fields):
    values = dict(name="toy", model=net(), example_input=torch.ones(1, 3, 6, 6), loss=F.cross_entropy)
    values |= dict(train_batches=batches, evaluate=lambda model: 0.5)
    return Task(**values | fields)


def build(): return net(), torch.ones(1, 3, 6, 6)
def raises(): raise ValueError("the first line\\nand a second one")
def leaves(): raise SystemExit(7)
def wrong(): return 3
def triple(): return 1, 2, 3
def needs(size): return size
def misfit(): return nn.Conv2d(3, 8, 3), torch.randn(1, 5, 8, 8)
def no_network(): return net, torch.ones(1)
def a_class(): return nn.ReLU, torch.ones(1)
def no_input(): return net(), None
def no_tensors(): return net(), ("a", "b")
def empty_input(): return net(), torch.ones(0, 3, 6, 6)
def nothing_to_cut(): return nn.Linear(3, 2), torch.ones(1, 3)
def no_parameters(): return nn.ReLU(), torch.ones(1, 3)
def no_name(): return task(name=" ")
def no_loss(): return task(loss=None)
def loss_in_words(): return task(loss="cross entropy")
def empty(): return task(train_batches=lambda epoch: [])
def none(): return task(train_batches=lambda epoch: None)
def no_pairs(): return task(train_batches=lambda epoch: [torch.ones(4, 3, 6, 6)])
def labels(): return task(train_batches=lambda epoch: [(torch.ones(4, 3, 6, 6), torch.full((4,), 9))])
def shapes(): return task(train_batches=lambda epoch: [(torch.ones(4, 5, 6, 6), torch.zeros(4, dtype=torch.long))])
def types(): return task(train_batches=lambda epoch: [(torch.ones(4, 3, 6, 6), torch.zeros(4, dtype=torch.bool))])
def vectors(): return task(loss=lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"))
def numbers(): return task(loss=lambda outputs, targets: 0.5)
def infinite(): return task(loss=lambda outputs, targets: F.cross_entropy(outputs, targets) * float("inf"))
def frozen(): return task(model=net().requires_grad_(False))
def unjudged(): return task()
def judged(): return task(evaluate=lambda model: "good")
def judge(): return task(evaluate=lambda model: 1 / 0)
def other(): return task(model=nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 4), nn.Flatten()))


def nan():
    model = net()
    model[2].weight.data[0] = float("nan")
    return task(model=model)


def loader(epoch):
    yield from batches(epoch)
    raise OSError("the disk of the images is gone")


def breaks(): return task(train_batches=loader)


class Prices:
    pass


text = "a text"
"""

INSPECT: Table = {
    "no task": ("inspect", "Missing argument 'TASK'"),
    "unknown task": ("inspect mobilnet_v1", "did you mean 'mobilenet_v1'?"),
    "empty task": ("inspect ''", "unknown task ''"),
    "unknown library": ("inspect timmm:resnet", "unknown task 'timmm:resnet'"),
    "library not there": ("inspect torchvision:resnet18", "torchvision"),
    "file not there": ("inspect none.py:build", "there is no file 'none.py'"),
    "folder for a file": ("inspect folder.py:build", "there is no file 'folder.py'"),
    "no function named": ("inspect net.py", "write net.py:FUNCTION"),
    "empty function name": ("inspect net.py:", "names no function"),
    "function not there": ("inspect net.py:bild", "did you mean 'build'?"),
    "no function": ("inspect net.py:text", "text is str"),
    "function that raises": ("inspect net.py:raises", "ValueError at net.py"),
    "function that exits": ("inspect net.py:leaves", "raised SystemExit"),
    "function with arguments": ("inspect net.py:needs", "give it a default"),
    "number returned": ("inspect net.py:wrong", "returned int"),
    "three things returned": ("inspect net.py:triple", "returned tuple of 3"),
    "syntax error": ("inspect broken.py:build", "SyntaxError"),
    "bytes that are no text": ("inspect binary.py:build", "SyntaxError"),
    "no network": ("inspect net.py:no_network", "is function; give a torch.nn.Module instance"),
    "class for a network": ("inspect net.py:a_class", "give an instance"),
    "no input": ("inspect net.py:no_input", "example_input"),
    "input of words": ("inspect net.py:no_tensors", "holds str"),
    "task without a name": ("inspect net.py:no_name", "give a non-empty string"),
    "batches without a loss": ("inspect net.py:no_loss", "has train_batches but no loss"),
    "loss that is a word": ("inspect net.py:loss_in_words", "loss of task 'toy' is str"),
    "input that does not fit": ("inspect net.py:misfit", "expected input[1, 5, 8, 8] to have 3 channels"),
    "unknown module frozen": ("inspect net.py:build --freeze nothing.*", "nothing.*"),
    "graph into a folder not there": ("inspect net.py:build -o none/a.graph", "cannot write none/a.graph"),
    "graph into a folder": ("inspect net.py:build -o .", "cannot write ."),
    "graph into a long name": (f"inspect net.py:build -o {'a' * 300}", "File name too long"),
    "two tasks": ("inspect net.py:build twice", "twice"),
    "unknown option": ("inspect net.py:build --colour", "--colour"),
    "option without its value": ("inspect net.py:build --freeze", "--freeze"),
}

TOP: Table = {
    "unknown verb": ("inspekt", "inspekt"),
    "verb in capitals": ("INSPECT", "INSPECT"),
    "unknown option at the top": ("--quiet inspect", "--quiet"),
}

DOCTOR: Table = {
    "unknown meter": ("doctor --quick --meter sundial", "sundial"),
    "unknown platform": ("doctor --quick --meter platform:jetson-tx1", "did you mean 'jetson-tx2'?"),
    "platform without a name": ("doctor --quick --meter platform:", "platform"),
    "watts in words": ("doctor --quick --meter cputime:many", "cputime"),
    "no watts": ("doctor --quick --meter cputime:0W", "cputime"),
    "negative watts": ("doctor --quick --meter cputime:-5W", "cputime"),
    "program not there": ("doctor --quick --meter command:no-such-program", "cannot be run"),
    "no program": ("doctor --quick --meter command:", "no program is given"),
    "program that fails": ("doctor --quick --meter command:false", "ended with exit code 1"),
    "program without a unit": ("doctor --quick --meter 'command:echo 5'", "no number is followed by a unit"),
    "program without a number": ("doctor --quick --meter 'command:W:echo many'", "there are 0 numbers"),
    "open quote": ('doctor --quick --meter "command:echo \'5 J"', "cannot be split into words"),
    "recording not there": ("doctor --quick --meter replay:none.profile", "cannot read none.profile"),
    "recording not named": ("doctor --quick --meter replay:", "no file is named"),
    "recording that is none": ("doctor --quick --meter replay:net.py", "net.py:1"),
    "class not there": ("doctor --quick --meter net.py:Prizes", "Prizes"),
    "class that is no meter": ("doctor --quick --meter net.py:Prices", "Prices"),
    "file of a meter not there": ("doctor --quick --meter none.py:Prices", "none.py"),
    "GPU that is not there": ("doctor --quick --meter nvml:99", "NVML"),
    "seconds below one": ("doctor --seconds 0.1", "--seconds"),
    "negative seconds": ("doctor --seconds -1", "--seconds"),
    "seconds in words": ("doctor --seconds long", "--seconds"),
    "seconds that are no number": ("doctor --seconds nan --meter platform:jetson-tx2", "--seconds"),
    "seconds without end": ("doctor --seconds inf --meter platform:jetson-tx2", "--seconds"),
    "an argument for the doctor": ("doctor me", "me"),
}

HUGE = "9" * 30
P = "profile net.py:build --meter platform:jetson-tx2 --rows 12 -o new.profile"
PROFILE: Table = {
    "no output": ("profile net.py:build", "--output"),
    "no task to profile": ("profile -o new.profile", "TASK"),
    "unknown task to profile": ("profile digit -o new.profile", "did you mean 'digits'?"),
    "unknown meter to profile": (f"{P} --meter sundial", "sundial"),
    "no rows": (f"{P} --rows 0", "rows=0 is below 1"),
    "negative rows": (f"{P} --rows -3", "rows=-3 is below 1"),
    "rows in words": (f"{P} --rows many", "--rows"),
    "rows and a half": (f"{P} --rows 2.5", "--rows"),
    "more rows than widths": (f"{P} --rows 1000", "has only 192 different widths"),
    "rows beyond counting": (f"{P} --rows {HUGE}", "is above 1000000"),
    "unknown design": (f"{P} --design corners", "design 'corners' is unknown"),
    "negative seed": (f"{P} --seed -1", "seed"),
    "seed in words": (f"{P} --seed lucky", "--seed"),
    "multiple of nothing": (f"{P} --multiple-of 0", "multiple_of=0"),
    "negative multiple": (f"{P} --multiple-of -8", "multiple_of=-8"),
    "multiple in words": (f"{P} --multiple-of eight", "--multiple-of"),
    "multiple beyond the widths": (f"{P} --multiple-of 1000", "different widths"),
    "rounds beyond counting": (f"{P} --rounds {HUGE}", "rounds"),
    "batch beyond memory": (f"{P} --batch {HUGE}", "batch"),
    "shard beyond counting": (f"{P} --shard {HUGE}/{HUGE}0", "shard"),
    "seed beyond counting": (f"{P} --seed {HUGE}", "seed"),
    "multiple beyond counting": (f"{P} --multiple-of {HUGE}", "different widths"),
    "no rounds": (f"{P} --rounds 0", "rounds=0 is below 1"),
    "rounds in words": (f"{P} --rounds twice", "--rounds"),
    "no references": (f"{P} --reference-every 0", "reference_every=0 is below 1"),
    "references in words": (f"{P} --reference-every often", "--reference-every"),
    "until in words": (f"{P} --until soon", "'soon' is not a share"),
    "until too much": (f"{P} --until 200%", "until=2.0 is not a share"),
    "until nothing": (f"{P} --until 0%", "until=0.0 is not a share"),
    "until no number": (f"{P} --until nan%", "not a share"),
    "shard without its number": (f"{P} --shard 3", "shard '3' is not written as K/N"),
    "shard beyond": (f"{P} --shard 9/8", "shard 9/8 does not exist"),
    "shard of nothing": (f"{P} --shard 0/0", "shard 0/0 does not exist"),
    "shard in words": (f"{P} --shard one/two", "is not written as K/N"),
    "shard without rows": (f"{P} --rows 3 --shard 8/9", "holds no row"),
    "batch of nothing": (f"{P} --batch 0", "batch 0 is below 1"),
    "negative batch": (f"{P} --batch -4", "batch -4 is below 1"),
    "batch in words": (f"{P} --batch big", "--batch"),
    "batch of an empty input": (
        "profile net.py:empty_input --meter platform:jetson-tx2 -o n --batch 2",
        "no batch can",
    ),
    "mode of arithmetic": (f"{P} --mode graph", "mode was chosen"),
    "device of arithmetic": (f"{P} --device cpu", "device was chosen"),
    "precision of arithmetic": (f"{P} --precision fp16", "precision was chosen"),
    "window of arithmetic": (f"{P} --window 1", "window_seconds was chosen"),
    "ticks of arithmetic": (f"{P} --min-ticks 5", "min_ticks was chosen"),
    "unknown mode": (f"{P} --meter cputime:15W --mode warp", "mode='warp' is unknown"),
    "unknown precision": (f"{P} --meter cputime:15W --precision fp8", "precision='fp8' is unknown"),
    "unknown memory format": (f"{P} --meter cputime:15W --memory-format odd", "memory_format='odd' is unknown"),
    "unknown device": (f"{P} --meter cputime:15W --device abacus", "device 'abacus' cannot be used here"),
    "device of another meter": (f"{P} --meter cputime:15W --device cuda", "cuda"),
    "graph on a CPU": (f"{P} --meter cputime:15W --mode graph --device cpu", "needs a CUDA device"),
    "no window": (f"{P} --meter cputime:15W --window 0", "window_seconds=0.0 is below"),
    "negative window": (f"{P} --meter cputime:15W --window -1", "window_seconds=-1.0 is below"),
    "window in words": (f"{P} --window long", "--window"),
    "window that is no number": (f"{P} --meter cputime:15W --window nan", "window_seconds=nan"),
    "window without end": (f"{P} --meter cputime:15W --window inf", "window"),
    "no ticks": (f"{P} --meter cputime:15W --min-ticks 0", "min_ticks=0 is below 1"),
    "ticks in words": (f"{P} --min-ticks few", "--min-ticks"),
    "profile into a folder not there": (f"{P} -o none/a.profile", "cannot write none/a.profile"),
    "profile into a folder": (f"{P} -o .", "cannot write ."),
    "profile into a file of mine": (f"{P} -o net.py", "net.py is not a profile, and is left as it is"),
    "profile into a compressed file": (f"{P} -o a.profile.gz", "is compressed"),
    "profile of another network": (f"{P} -o digits.profile --rows 5", "cannot be continued"),
    "nothing to cut": ("profile net.py:nothing_to_cut --meter platform:jetson-tx2 -o n", "cut"),
    "everything frozen": (f"{P} --freeze 0 --freeze 2", "cut"),
    "recording of another network": (f"{P} --meter replay:digits.profile --rows 5", "was recorded of network"),
}

FIT: Table = {
    "no profile": ("fit", "PROFILE"),
    "profile not there": ("fit none.profile", "cannot read none.profile"),
    "folder for a profile": ("fit .", "cannot read ."),
    "another file": ("fit net.py", "net.py:1: this is not JSON"),
    "model for a profile": ("fit energy.json", "energy.json:1: this is not JSON"),
    "empty profile": ("fit empty", "holds no profile yet"),
    "header alone": ("fit header.profile", "holds 0 networks"),
    "torn compressed profile": ("fit torn.profile.gz", "is not a whole gzip file"),
    "device for a profile": ("fit /dev/zero", "is not a plain file"),
    "unknown family": ("fit digits.profile --family magic", "there is no family 'magic'"),
    "unknown resource": ("fit digits.profile --resource money", "knows nothing of 'money'"),
    "budget in words": ("fit digits.profile --budget sixty", "starts with no number"),
    "no budget": ("fit digits.profile --budget 0%", "is not above 0"),
    "model into a folder not there": ("fit digits.profile -o none/e.json", "cannot write none/e.json"),
    "model into a folder": ("fit digits.profile -o .", "cannot write ."),
    "figures into a file": ("fit digits.profile --figures net.py", "net.py"),
    "iterations in words": ("fit digits.profile --paper many", "--paper"),
    "negative iterations": ("fit digits.profile --figures figures --paper -5", "iterations"),
    "two profiles": ("fit digits.profile digits.profile", "digits.profile"),
}

MERGE: Table = {
    "nothing to merge": ("merge -o all", "FILE"),
    "one to merge": ("merge digits.profile -o all", "1 file was given to merge"),
    "no output to merge into": ("merge digits.profile digits.profile", "--output"),
    "merge into a file of mine": ("merge digits.profile net.profile -o net.py", "exists already, and is left as it is"),
    "merge what is not there": ("merge none.profile digits.profile -o all", "cannot read none.profile"),
    "merge another file": ("merge digits.profile net.py -o all", "net.py:1"),
    "merge a profile with itself": ("merge digits.profile digits.profile -o all", "stands both in"),
    "merge two networks": ("merge digits.profile net.profile -o all", "cannot be merged"),
    "merge into a folder not there": ("merge net.profile net2.profile -o none/all", "cannot write none/all"),
}

C = "compress net.py:task --energy net.json --meter none --steps 3 --tune-steps 0"
B = f"{C} -o new --budget"
BUDGETS: Table = {
    "budget of nothing": (f"{B} 0%", "is not above 0"),
    "negative budget": (f"{B}=-5%", "is not above 0"),
    "budget below the floor": (f"{B} 1%", "the least this network can use"),
    "budget in words ": (f"{B} sixty", "starts with no number"),
    "empty budget": (f"{B} ''", "starts with no number"),
    "budget in kilograms": (f"{B} 5kg", "has the unit 'kg'"),
    "budget in seconds": (f"{B} 5ms", "has the unit 'ms'"),
    "budget without end": (f"{B} 1e999%", "is not above 0"),
    "budget that is no number": (f"{B} nan%", "starts with no number"),
    "budget of money": (f"{B} money=5", "is about 'money'"),
    "budget per hour": (f"{B} 5mJ/hour", "is per 'hour'"),
    "parameters per image": (f"{B} params=5k/image", "does not grow with the batch"),
    "thousandths of parameters": (f"{B} params=2m", "has the unit 'm'"),
    "two budgets of energy": (f"{B} 50% --budget 9mJ", "two budgets of energy"),
    "latency without its model": (f"{B} latency=1ms", "no model of it. Fit one: ecc fit"),
    "no parameters": (f"{B} params=1", "budget 1 of params is below"),
    "no budget at all": (f"{C} -o new", "--budget"),
}

K = f"{B} 80%"
COMPRESS: Table = {
    "no folder": (f"{C} --budget 60%", "--output"),
    "unknown task to compress": ("compress digit --energy net.json --budget 60% -o new", "did you mean 'digits'?"),
    "no model": ("compress net.py:task --budget 60% -o new", "--energy is missing"),
    "model not there": (f"{K} --energy none.json", "cannot read none.json"),
    "profile for a model": (f"{K} --energy net.profile", "net.profile is"),
    "folder for a model": (f"{K} --energy .", "cannot read ."),
    "model of another network": (f"{K} --energy digits.json", "about the same resource"),
    "two models of energy": (f"{K} --energy net.json", "about the same resource"),
    "network of another model": (
        "compress net.py:other --energy net.json --meter none --budget 60% -o new",
        "belongs to",
    ),
    "frozen after profiling": (f"{K} --freeze 0", "belongs to network"),
    "unknown method": (f"{K} --method magic", "magic"),
    "unknown granularity": (f"{K} --granularity atom", "granularity 'atom' is unknown"),
    "weights with a model": (f"{K} --granularity weight", "--energy is for channels"),
    "weights by a method": (
        "compress net.py:task --granularity weight --method lcp --budget 50% -o new",
        "prunes channels",
    ),
    "weights on a meter": ("compress net.py:task --granularity weight --meter none --budget 50% -o new", "none"),
    "no steps": (f"{K} --steps 0", "steps=0 is below 1"),
    "steps in words": (f"{K} --steps many", "--steps"),
    "negative tuning": (f"{K} --tune-steps -1", "tune_steps=-1 is below 0"),
    "tuning in words": (f"{K} --tune-steps some", "--tune-steps"),
    "negative training": (f"{K} --train-steps -1", "train_steps=-1 is below 0"),
    "training in words": (f"{K} --train-steps some", "--train-steps"),
    "rate of nothing": (f"{K} --lr 0", "lr=0.0 is outside 0..1"),
    "rate that is no number": (f"{K} --lr nan", "lr=nan is outside 0..1"),
    "rate without end": (f"{K} --lr inf", "lr=inf is outside 0..1"),
    "rate in words": (f"{K} --lr slow", "--lr"),
    "rate of training": (f"{K} --train-lr 7", "train_lr=7.0 is outside 0..1"),
    "rate of training in words": (f"{K} --train-lr slow", "--train-lr"),
    "distillation above one": (f"{K} --distill 3", "weight of distillation is 3.0"),
    "distillation of no number": (f"{K} --distill nan", "weight of distillation is nan"),
    "distillation in words": (f"{K} --distill half", "--distill"),
    "no temperature": (f"{K} --temperature 0", "temperature"),
    "temperature in words": (f"{K} --temperature hot", "--temperature"),
    "temperature of no number": (f"{K} --temperature nan", "temperature"),
    "share above one": (f"{K} --min-share 2", "min_share=2.0 is a share"),
    "negative share": (f"{K} --min-share -0.1", "min_share=-0.1 is a share"),
    "share of no number": (f"{K} --min-share nan", "min_share=nan is a share"),
    "share in words": (f"{K} --min-share most", "--min-share"),
    "share that leaves nothing to cut": (f"{K} --min-share 1", "the least this network can use"),
    "multiples of nothing": (f"{K} --round-to 0", "round_to=0 is below 1"),
    "multiples beyond the widths": (f"{K} --round-to {HUGE}", "the least this network can use"),
    "multiples in words": (f"{K} --round-to eight", "--round-to"),
    "unknown device to train on": (f"{K} --device abacus", "device 'abacus' cannot be used here"),
    "device without memory": (f"{K} --device meta", "meta"),
    "unknown precision to train in": (f"{K} --precision fp8", "precision is 'fp8'"),
    "no micro-batch": (f"{K} --micro-batch 0", "micro_batch is 0"),
    "micro-batch in words": (f"{K} --micro-batch small", "--micro-batch"),
    "no norm": (f"{K} --clip-norm 0", "clip_norm is 0.0"),
    "norm of no number": (f"{K} --clip-norm nan", "clip_norm is nan"),
    "norm in words": (f"{K} --clip-norm short", "--clip-norm"),
    "seed in words to train": (f"{K} --seed lucky", "--seed"),
    "no time between checkpoints": (f"{K} --checkpoint-seconds 0", "checkpoint_seconds is 0.0"),
    "time that is no number": (f"{K} --checkpoint-seconds nan", "checkpoint_seconds is nan"),
    "time in words": (f"{K} --checkpoint-seconds often", "--checkpoint-seconds"),
    "curves into a file": (f"{K} --tensorboard net.py", "cannot make the folder net.py"),
    "run in a file": (f"{C} --budget 80% -o net.py", "net.py is a file; a run needs a folder"),
    "run in a folder of mine": (f"{C} --budget 80% -o .", "and is no run; it is left as it is"),
    "run below a file": (f"{C} --budget 80% -o net.py/run", "net.py/run"),
    "run in a long name": (f"{C} --budget 80% -o {'a' * 300}", "File name too long"),
    "unknown meter to weigh": (f"{K} --meter sundial", "sundial"),
    "meter of another device": (f"{K} --meter platform:eyeriss", "fitted on NVIDIA Jetson TX2"),
}

T = "--energy net.json --meter none --steps 3 --tune-steps 2 --budget 80% -o new"
TRAINING: Table = {
    "task that cannot train": (f"compress net.py:build {T}", "has no train_batches and loss"),
    "no batches": (f"compress net.py:empty {T}", "gave no batch"),
    "batches of nothing": (f"compress net.py:none {T}", "raised TypeError"),
    "batches that are no pairs": (f"compress net.py:no_pairs {T}", "it must give pairs (inputs, targets)"),
    "label out of range": (f"compress net.py:labels {T}", "Target 9 is out of bounds"),
    "input of another shape": (f"compress net.py:shapes {T}", "at step 1 the network or its loss raised RuntimeError"),
    "labels of another type": (f"compress net.py:types {T}", "the network or its loss raised"),
    "loss that is no scalar": (f"compress net.py:vectors {T}", "the network or its loss raised"),
    "loss that is no tensor": (f"compress net.py:numbers {T} --distill 0", "the network or its loss raised"),
    "loss without end": (f"compress net.py:infinite {T}", "is not finite at step 1"),
    "frozen network": (f"compress net.py:frozen {T}", "no parameter of task 'toy' can be trained"),
    "weights that are no numbers": (f"compress net.py:nan {T}", "2.weight of task 'toy' holds NaN"),
    "score in words": (f"compress net.py:judged {T}", "evaluate of task 'toy' raised ValueError"),
    "score that raises": (f"compress net.py:judge {T}", "evaluate of task 'toy' raised ZeroDivisionError"),
    "loader that breaks": (
        f"compress net.py:breaks {T} --steps 9",
        "at batch 3, raised OSError: the disk of the images",
    ),
    "method without a judge": (f"compress net.py:unjudged {T} --method netadapt", "evaluate_held_out"),
    "network without parameters": (f"compress net.py:no_parameters {T}", "no_parameters"),
}

G = "compare net.py:task --energy net.json --meter none -o new"
COMPARE: Table = {
    "no grid folder": ("compare net.py:task --energy net.json", "--output"),
    "no model to compare": ("compare net.py:task -o new", "--energy"),
    "unknown task to compare": ("compare digit --energy net.json --meter none -o new", "did you mean 'digits'?"),
    "model not there to compare": ("compare net.py:task --energy none.json -o new", "cannot read none.json"),
    "unknown method to compare": (f"{G} --methods magic", "there is no method 'magic'"),
    "no method to compare": (f"{G} --methods ''", "at least one method"),
    "scratch alone": (f"{G} --methods scratch", "compare ecc as well"),
    "budgets in words": (f"{G} --methods ecc --budgets sixty", "starts with no number"),
    "no budgets": (f"{G} --methods ecc --budgets ''", "at least one method, one budget"),
    "no seeds": (f"{G} --methods ecc --seeds 0", "one seed"),
    "seeds beyond counting": (f"{G} --seeds {HUGE}", "seeds"),
    "seeds in words": (f"{G} --seeds many", "--seeds"),
    "no steps to compare": (f"{G} --methods ecc --steps 0", "steps=0 is below 1"),
    "steps in words to compare": (f"{G} --steps many", "--steps"),
    "negative tuning to compare": (f"{G} --tune-steps -1", "tune_steps=-1 is below 0"),
    "tuning in words to compare": (f"{G} --tune-steps some", "--tune-steps"),
    "negative training to compare": (f"{G} --train-steps -1", "train_steps=-1 is below 0"),
    "rate to compare": (f"{G} --lr 0", "lr=0.0 is outside 0..1"),
    "rate in words to compare": (f"{G} --lr slow", "--lr"),
    "rate of training to compare": (f"{G} --train-lr nan", "train_lr=nan is outside 0..1"),
    "unknown meter to compare": (f"{G} --meter sundial", "sundial"),
    "unknown device to compare": (f"{G} --methods ecc --device abacus", "device 'abacus' cannot be used here"),
    "grid in a file": (
        "compare net.py:task --energy net.json --meter none -o net.py --methods ecc",
        "net.py is no grid",
    ),
    "grid in a folder of mine": (
        "compare net.py:task --energy net.json --meter none -o . --methods ecc",
        ". is no grid",
    ),
}

TABLE: Table = {
    **INSPECT,
    **TOP,
    **DOCTOR,
    **PROFILE,
    **FIT,
    **MERGE,
    **BUDGETS,
    **COMPRESS,
    **TRAINING,
    **COMPARE,
}
