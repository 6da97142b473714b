"""docs/python.md and docs/python-frameworks.md are what the docstrings of the Python client say; UPDATE_DOCS=1 writes them anew.
Read from the sources, so that no framework need be installed."""

from __future__ import annotations

import ast
import inspect
import os
import pathlib
import re

import pytest

from conftest import ROOT

PACKAGE = ROOT / "client/python/weightwire"
WRITTEN = "Written from the docstrings by `UPDATE_DOCS=1` pytest `tests/python/test_python_doc.py`."
#: Page: what stands above it, and the modules that need nothing but the package; all other public modules are on the second one.
CORE = ("weightwire", "weightwire.aio", "weightwire.checkpoint", "weightwire.checkpoint.adam", "weightwire.nccl", "weightwire.store", "weightwire.boxes")
HEADS = {
    "python.md": f"""# The Python client

{WRITTEN} How they are used: [getting started](getting-started.md), [checkpoints](checkpoints.md), [NCCL](nccl.md). Modules for
trainers and engines are on a [page of their own](python-frameworks.md).
""",
    "python-frameworks.md": f"""# Python modules for trainers and engines

{WRITTEN} How they are used: [trainers](trainers.md), [vLLM](vllm.md), [verl](verl.md), [slime, NeMo-RL and TRL](frameworks.md),
[SGLang](sglang.md). A module imports its framework; `import weightwire` needs none of them. What needs no framework:
[the Python client](python.md).
"""}
#: Modules that others of the package import and users do not. Every other one is public, a new one too.
INTERNAL = {f"weightwire.{name}" for name in (
    "binaries", "client", "device", "device_choice", "device_library", "errors", "export_check", "gpu_copy", "hf_export", "host_copy", "interrupts", "local_daemon", "megatron_options", "megatron_state", "memory",
    "nccl_library", "publisher", "recorded", "run_command", "session", "stage_memory", "status", "subscriber", "tls", "torch_cuda",
    "tensor_stream", "torch_dtypes", "trace", "verl_plugin", "waiting")}
#: Of the packages these are public beside what the package itself offers.
OF_PACKAGES = ("weightwire.checkpoint.adam", "weightwire.vllm.features")
# What other modules of the package call, and nobody else.
_NOT_SHOWN = {"from_proto", "to_proto"}
# Of modules that are mostly for others.
_SHOWN = {"weightwire.adapter": {"LivePublisher"}, "weightwire.colocated": {"Export", "Exporter", "HandOver", "export", "export_boxes", "held_by"}, "weightwire.mbridge": {"Publisher"}, "weightwire.megatron_bridge": {"Publisher"},
          "weightwire.torch": {"Publisher", "Receiver", "model", "named_tensors"}, "weightwire.megatron": {"Publisher", "model", "named_tensors"},
          "weightwire.fsdp": {"Publisher", "Receiver", "model", "read_sharded"}, "weightwire.peft": {"Publisher"},
          "weightwire.vllm.features": {"changed"}, "weightwire.vllm_trainer": {"InitInfo", "TrainerEngine", "register"}}
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def definitions(module: ast.Module) -> dict[str, ast.AST]:
    return {node.name: node for node in module.body if isinstance(node, _DEFINITIONS)}


def exported(path: pathlib.Path) -> dict[str, ast.AST]:
    """What the module offers: the names of its __all__, wherever they are defined, else what is defined in it and not private."""
    module = tree(path)
    assigned = {getattr(node.targets[0], "id", ""): node.value for node in module.body if isinstance(node, ast.Assign)}
    here = definitions(module)
    if "__all__" not in assigned:
        return {name: node for name, node in here.items() if not name.startswith("_")}
    origins = {alias.asname or alias.name: (node.module, alias.name) for node in module.body
               if isinstance(node, ast.ImportFrom) for alias in node.names}
    names: list[str] = []
    for item in assigned["__all__"].elts:
        if isinstance(item, ast.Starred):  # a table of names and their submodules, or whole modules, which are imported when they are asked for
            lazy = ast.literal_eval(assigned[item.value.id])
            origins |= {name: (home if "." in home else f"{module_name(path)}.{home}", name) for name, home in lazy.items()}
            names += lazy
        else:
            names.append(ast.literal_eval(item))
    found = {}
    for name in names:
        if name in here:
            found[name] = here[name]
        elif name in origins and origins[name][0].startswith("weightwire"):
            found[name] = definitions(tree(source_of(origins[name][0])))[origins[name][1]]
    return found


def source_of(module: str) -> pathlib.Path:
    source = PACKAGE.parent / (module.replace(".", "/") + ".py")
    return source if source.exists() else source.with_suffix("") / "__init__.py"


def module_name(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def public() -> list[str]:
    """Modules of the package and packages in it, without those whose name begins with _ and the generated stubs."""
    paths = [path for path in [*PACKAGE.glob("[!_]*.py"), *PACKAGE.glob("[!_]*/__init__.py")] if path.parent.name != "v1"]
    return sorted({"weightwire", *map(module_name, paths), *OF_PACKAGES} - INTERNAL)


def signature(node) -> str:
    arguments = ast.unparse(node.args)
    for own in ("self, ", "self", "cls, ", "cls"):
        arguments = arguments.removeprefix(own)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}{node.name}({arguments}){result}"


def text_of(node) -> str:
    """The docstring. What is indented in it is kept as it stands."""
    return inspect.cleandoc(ast.get_docstring(node, clean=False) or "")


def decorated(node, *names: str) -> bool:
    return any(ast.unparse(d).split("(")[0] in names for d in node.decorator_list)


def fields(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign) and not item.target.id.startswith("_")]


def entry(name: str, node) -> list[str]:
    if not isinstance(node, ast.ClassDef):
        return [f"### {name}", f"```python\n{signature(node)}\n```", *prose(text_of(node))]
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    methods = [item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
    construct = next((method for method in methods if method.name == "__init__"), None)
    head = f"class {name}" + (f"({bases})" if bases else "")
    if construct is not None:
        head = "class " + signature(construct).replace("__init__", name, 1).removesuffix(" -> None")
    out = [f"### {name}", "```python\n" + "\n".join([head, *(f"    {field}" for field in fields(node))]) + "\n```",
           *prose(text_of(node)), *(prose(text_of(construct)) if construct else [])]
    same = []  # coroutines of aio that say nothing of their own: as the plain method of that name
    for method in methods:
        if method.name.startswith("_") or method.name in _NOT_SHOWN:
            continue
        if isinstance(method, ast.AsyncFunctionDef) and not text_of(method):
            same.append(f"`{method.name}`")
            continue
        shown = f"{method.name}: {ast.unparse(method.returns)}" if decorated(method, "property", "cached_property") and method.returns else signature(method)
        said = text_of(method)
        out += [f"**`{shown}`**", *prose(said)]
    return out + ([f"Coroutines that take and return what the methods of weightwire.{name} do: {', '.join(same)}."] if same else [])


def prose(text: str) -> list[str]:
    """Paragraphs; those that are laid out by hand (columns, examples) as they are."""
    out = []
    for paragraph in filter(None, text.split("\n\n")):
        by_hand = any(line.startswith((" ", ">>>")) for line in paragraph.splitlines()) or any(
            len(line) < 60 and ":" in line for line in paragraph.splitlines()[:-1])
        out.append(f"```\n{paragraph}\n```" if by_hand else paragraph)
    return out


def page_of(name: str, modules) -> str:
    parts = [HEADS[name].strip()]
    for module in modules:
        path = source_of(module)
        parts += [f"## {module}", *prose(text_of(tree(path)))]
        for item, node in exported(path).items():
            if item in _SHOWN.get(module, {item}):
                parts += entry(item, node)
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize("name", HEADS)
def test_the_page_is_what_the_docstrings_say(name):
    modules = CORE if name == "python.md" else [module for module in public() if module not in CORE]
    page = page_of(name, modules)
    file = ROOT / "docs" / name
    if os.environ.get("UPDATE_DOCS"):
        file.write_text(page)
    assert file.read_text() == page, f"UPDATE_DOCS=1 writes docs/{name} anew"


def test_what_pages_and_examples_import_is_public():
    """And what is called internal exists: a module that was renamed would be public under its new name."""
    texts = [path.read_text() for path in [*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("client/python/examples/*")]
             if path.suffix in (".md", ".py")]
    named = {module for text in texts for module in re.findall(r"^\s*(?:from|import) (weightwire[.\w]*)", text, re.M)}
    assert len(named) > 8 and named <= set(public()), named - set(public())
    assert all(source_of(module).exists() for module in {*INTERNAL, *CORE, *OF_PACKAGES})
    gone = []
    for module, names in re.findall(r"^\s*from (weightwire[.\w]*) import ([\w, ]+)", "\n".join(texts), re.M):
        offered = {*definitions(tree(source_of(module))), *exported(source_of(module))}
        gone += [f"{module}.{name}" for name in re.findall(r"(\w+)(?: as \w+)?(?:,|$)", names)
                 if name not in offered and f"{module}.{name}" not in public()]
    assert not gone


def test_what_is_shown_of_a_module_is_there():
    gone = {module: names - exported(source_of(module)).keys() for module, names in _SHOWN.items()}
    assert not any(gone.values()), gone
    assert {"EngineDriver", "register"} <= exported(source_of("weightwire.vllm")).keys()
    assert {"WeightwireCheckpointEngine"} <= exported(source_of("weightwire.verl")).keys()


def test_what_the_package_exports_says_what_it_is():
    """Classes and functions, and the public methods of the clients."""
    silent = []
    for module in ("weightwire", "weightwire.aio", "weightwire.checkpoint"):
        for item, node in exported(source_of(module)).items():
            silent += [f"{module}.{item}"] if not text_of(node) and not (isinstance(node, ast.ClassDef) and fields(node)) else []
    assert not silent, f"without a docstring: {silent}"
    assert {"Publisher", "Subscriber", "Client", "Offer"} <= exported(PACKAGE / "__init__.py").keys()
