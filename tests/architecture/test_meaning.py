"""What the package decides by is a field: it reads no text that it wrote, and tells nothing apart by its spelling."""

import ast
import re
from pathlib import Path

import lightning_tricks

_PACKAGE = Path(lightning_tricks.__file__).parent
_OF_TEXTS = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "count"}
_OF_TEXTS |= {"find", "index", "replace"}
_CASES = {"islower", "isupper", "istitle", "lower", "upper", "casefold"}
_FLAG = re.compile(r"(.*\.)?(is|has|are|was|can|may|needs|takes)_\w+")
_ALLOWED = {  # file and a part of the expression -> whose text it is, or why it has to be a text
    ("_torch_compat/memory.py", "out of memory"): "of CUDA and of torch",
    ("_torch_compat/memory.py", "DefaultCPUAllocator"): "of torch",
    ("auto_resume/core/configuration.py", "BUFFER"): "checkpoints hold these values as texts",
    ("auto_resume/core/configuration.py", "OBJECT"): "checkpoints hold these values as texts",
    ("auto_resume/core/configuration.py", "IN_USE"): "checkpoints hold these values as texts",
    ("auto_resume/core/optimizer_changes.py", "optimizer "): "a label, by which checkpoints name an optimizer",
    ("auto_resume/core/optimizer_changes.py", "scheduler "): "a label, by which checkpoints name a scheduler",
    ("auto_resume/fit_state.py", "ORDER_OF_SUMS"): "a name among those of state, which callbacks are told",
    ("auto_resume/run_configuration.py", "BUFFER"): "checkpoints hold these values as texts",
    ("auto_resume/run_configuration.py", "optimizer "): "a label, by which checkpoints name an optimizer",
    ("checkpoint_remapping/core/files/checkpoint.py", "name.lower()"): "names in files of others",
    ("checkpoint_remapping/core/matching/path_context.py", "VAGUE_WORDS"): "names in models of others",
    ("devices/core/gpu_table.py", "bus_id"): "of NVML",
    ("finetuning/core/lora_layers.py", "__name__.lower()"): "names of classes of others",
    ("finetuning/core/trainable_weights.py", "NOTE"): "the name of an entry of a checkpoint",
    ("hang_watch/functional.py", 'File "'): "of Python's faulthandler",
    ("metrics/callback.py", "key.lower()"): "keys that modules log",
    ("run_report/core/comparison_page.py", "name.lower()"): "keys that modules log",
    ("run_report/core/curves.py", ".lower()"): "keys that modules log",
    ("run_report/core/loss_findings.py", ".lower()"): "keys that modules log",
    ("run_report/core/page.py", "name.lower()"): "keys that modules log",
    ("testing.py", "AutoResume: "): "a warning has no other mark of who gives it",
    ("training_cli.py", "Expected a"): "of jsonargparse",
    ("training_cli.py", "Got value"): "of jsonargparse",
}
_KNOWN = """
SAID = "the loader is the bottleneck; try more"
IN_THE_FIT = "in the fit)"
def keeps_up(wait): return f"{wait}: the loader keeps up."
def is_fast(verdict): return "keeps up" not in verdict
def remedy(verdict): return re.search(r"bottleneck; (.*)", verdict)
def waits(schedulers): return "plateau" in schedulers.lower()
def batches(used, there): return f"{used} of {there}"
def used(text): return text.partition(" of ")[0]
def name(path): return f"{path} (a callback that was added in the fit)"
def comes_again(name): return name.endswith(IN_THE_FIT)
def is_hook(hook): return hook.islower()
def key(entry): return entry.key + "/*" * entry.is_per_class
def plural(ranks): return "rank" + "s" * (len(ranks) > 1)
def is_mistake(caption): return caption.startswith("!")
"""


def _literals(node, constants):
    """The texts in an expression, also those that it names; a list of words that is split is none."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "split":
        return []
    found = [getattr(node, "value", None), constants.get(getattr(node, "id", None))]
    inner = [text for child in ast.iter_child_nodes(node) for text in _literals(child, constants)]
    return [text for text in (*found, *inner) if isinstance(text, str)]


def _sought(node):
    """What an expression that looks into a text looks for."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn | ast.Eq | ast.NotEq):
        return [node.left, *node.comparators]
    function = getattr(node, "func", None)
    is_of_re = getattr(getattr(function, "value", None), "id", "") == "re"
    return node.args[:1] if is_of_re or getattr(function, "attr", "") in _OF_TEXTS else []


def _constants(tree):
    pairs = []
    for node in (node for node in tree.body if isinstance(node, ast.Assign)):
        target, value = node.targets[0], node.value
        is_tuple = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        pairs += zip(target.elts, value.elts, strict=False) if is_tuple else [(target, value)]
    return {getattr(one, "id", ""): text.value for one, text in pairs if isinstance(getattr(text, "value", None), str)}


def _decides(node, constants, written):
    """Whether an expression decides by a text that is written elsewhere, by the case of letters, or by a factor."""
    texts = [text for one in _sought(node) for text in _literals(one, constants)]
    parts = [part for text in texts for part in re.split(r"[\\()\[\].*+?|^$]", text)]
    sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
    called = {getattr(getattr(side, "func", None), "attr", "") for side in sides}
    for text, factor in ((node.left, node.right), (node.right, node.left)) if isinstance(node, ast.BinOp) else ():
        is_text = isinstance(text, ast.JoinedStr) or isinstance(getattr(text, "value", None), str)
        is_flag = isinstance(factor, ast.Compare | ast.BoolOp) or _FLAG.fullmatch(ast.unparse(factor))
        if isinstance(node.op, ast.Mult) and is_text and (is_flag or re.search("[a-zA-Z]", ast.unparse(text)[2:-1])):
            return True
    is_own = any(" " in part and re.search("[a-z]", part) and part in written for part in parts)
    return is_own or texts == ["!"] or called & _CASES or getattr(node, "attr", "") in ("islower", "isupper", "istitle")


def _decisions(sources):
    """File and expression of what decides by a text that these sources write, or by a spelling."""
    trees = {name: ast.parse(source) for name, source in sources.items()}
    nodes = {name: [*ast.walk(tree)] for name, tree in trees.items()}
    own = {name: _constants(tree) for name, tree in trees.items()}
    public = {name: text for of in own.values() for name, text in of.items() if name[:1] != "_"}
    every = [node for of in nodes.values() for node in of]
    unwritten = {part for node in every for one in _sought(node) for part in ast.walk(one)}
    unwritten |= {node.value for node in every if isinstance(node, ast.Expr)}  # docstrings
    texts = [node.value for node in every if isinstance(node, ast.Constant) and node not in unwritten]
    written = "\n".join(text for text in texts if isinstance(text, str))
    return [
        (at, ast.unparse(node)) for at, of in nodes.items() for node in of if _decides(node, public | own[at], written)
    ]


def test_the_readings_that_there_were_are_found():
    found = "\n".join(expression for _, expression in _decisions({"known.py": _KNOWN}))
    for said in (
        "keeps up",
        "bottleneck",
        "plateau",
        "' of '",
        "IN_THE_FIT",
        "islower",
        "is_per_class",
        "'s' *",
        "'!'",
    ):
        assert said in found


def test_nothing_decides_by_a_sentence_or_a_spelling():
    sources = {path.relative_to(_PACKAGE).as_posix(): path.read_text("utf-8") for path in _PACKAGE.rglob("*.py")}
    found = _decisions(sources)
    reasons = {one: [why for why in _ALLOWED if why[0] == one[0] and why[1] in one[1]] for one in found}
    assert not [one for one, why in reasons.items() if not why]
    assert {*_ALLOWED} == {one for why in reasons.values() for one in why}, "each exception is still one"
    for path in _PACKAGE.rglob("*.html"):
        assert not re.search(r"startswith|endswith|lower|upper|[\"'] in \w", path.read_text("utf-8")), path
