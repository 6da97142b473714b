"""docs/python.md is what the docstrings of the Python client say; UPDATE_DOCS=1 writes it anew. Read from the sources, so that
no framework need be installed."""

from __future__ import annotations

import ast
import inspect
import os
import pathlib

from conftest import ROOT

PAGE = ROOT / "docs/python.md"
PACKAGE = ROOT / "client/python/weightwire"
HEAD = """# The Python client

Written from the docstrings by `UPDATE_DOCS=1` pytest `tests/python/test_python_doc.py`. How they are used: [getting
started](getting-started.md), [trainers](trainers.md), [checkpoints](checkpoints.md), [NCCL](nccl.md).
"""
PAGES = (("weightwire", "__init__.py"), ("weightwire.aio", "aio.py"), ("weightwire.checkpoint", "checkpoint/__init__.py"),
         ("weightwire.nccl", "nccl.py"), ("weightwire.adapter", "adapter.py"), ("weightwire.torch", "torch.py"),
         ("weightwire.fsdp", "fsdp.py"), ("weightwire.megatron", "megatron.py"))
# What other modules of the package call, and nobody else.
_NOT_SHOWN = {"from_proto", "to_proto"}
_SHOWN = {"weightwire.adapter": {"LivePublisher"}}  # of modules that are mostly for others
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def definitions(module: ast.Module) -> dict[str, ast.AST]:
    return {node.name: node for node in module.body if isinstance(node, _DEFINITIONS)}


def exported(path: pathlib.Path) -> dict[str, ast.AST]:
    """What the module offers: the names of its __all__, wherever they are defined, else what is defined in it and not private."""
    module = tree(path)
    names = next((ast.literal_eval(node.value) for node in module.body if isinstance(node, ast.Assign)
                  and getattr(node.targets[0], "id", "") == "__all__"), None)
    here = definitions(module)
    if names is None:
        return {name: node for name, node in here.items() if not name.startswith("_")}
    origins = {alias.asname or alias.name: (node.module, alias.name) for node in module.body
               if isinstance(node, ast.ImportFrom) for alias in node.names}
    found = {}
    for name in names:
        if name in here:
            found[name] = here[name]
        elif name in origins and (module_name := origins[name][0]).startswith("weightwire"):
            source = PACKAGE.parent / (module_name.replace(".", "/") + ".py")
            source = source if source.exists() else source.with_suffix("") / "__init__.py"
            found[name] = definitions(tree(source))[origins[name][1]]
    return found


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
        shown = f"{method.name}: {ast.unparse(method.returns)}" if decorated(method, "property") and method.returns else signature(method)
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


def test_the_page_is_what_the_docstrings_say():
    parts = [HEAD.strip()]
    for name, file in PAGES:
        path = PACKAGE / file
        parts += [f"## {name}", *prose(text_of(tree(path)))]
        for item, node in exported(path).items():
            if item in _SHOWN.get(name, {item}):
                parts += entry(item, node)
    page = "\n\n".join(parts) + "\n"
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "UPDATE_DOCS=1 writes docs/python.md anew"


def test_what_the_package_exports_says_what_it_is():
    """Classes and functions, and the public methods of the clients."""
    silent = []
    for name, file in PAGES[:3]:
        for item, node in exported(PACKAGE / file).items():
            silent += [f"{name}.{item}"] if not text_of(node) and not (isinstance(node, ast.ClassDef) and fields(node)) else []
    assert not silent, f"without a docstring: {silent}"
    assert {"Publisher", "Subscriber", "Client", "Offer"} <= exported(PACKAGE / "__init__.py").keys()
