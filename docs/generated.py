"""Pages of the site that are made when it is built; mkdocs.yml names this file as a hook.

- The start page is README.md, and CONTRIBUTING.md is a page.
- ``reference/commands.md`` is what Typer says of each command, ``reference/methods.md`` what each method's class says,
  ``reference/messages.md`` every message that the source raises.
- A file of the repository that a page links to is a page below ``source/``, so that no link leaves the site and each is
  checked.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""Files outside docs/ that are pages of their own."""

_SHOWN = {".md": "", ".py": "python", ".toml": "toml", ".sh": "bash", ".cu": "cpp", ".yml": "yaml"}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)((?:#[^)\s]*)?)(?=\))")
_FENCED = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)


def page_of(path: PurePosixPath) -> str:
    """Return the page, or the file of the site, that shows a file or folder of the repository."""
    if str(path) in MOVED:
        return MOVED[str(path)]
    if path.is_relative_to("docs"):
        return str(path.relative_to("docs"))
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    return f"source/{path}" if path.suffix == ".md" else f"source/{path}.md"


def origin_of(page: str) -> PurePosixPath:
    """Return the file or folder of the repository that a page shows."""
    for path, name in MOVED.items():
        if name == page:
            return PurePosixPath(path)
    if not page.startswith("source/"):
        return PurePosixPath("docs") / page
    path = PurePosixPath(page).relative_to("source")
    if path.name == "index.md" and (ROOT / path.parent).is_dir():
        return path.parent
    return path if (ROOT / path).is_file() else path.with_suffix("")


def links_of(text: str, origin: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yield the files and folders of the repository that a page links to; one that is not there raises an error."""
    for part in _FENCED.split(text)[::2]:
        for found in _LINK.finditer(part):
            yield _target(found[1], origin)


def _target(link: str, origin: PurePosixPath) -> PurePosixPath:
    folder = origin if (ROOT / origin).is_dir() else origin.parent
    path = (ROOT / folder / link).resolve()
    if not path.exists() or not path.is_relative_to(ROOT):
        raise FileNotFoundError(f"{origin} links to {link}, which is not in the repository")
    return PurePosixPath(path.relative_to(ROOT).as_posix())


def relinked(text: str, page: str) -> str:
    """Return a page's text with its links to files of the repository as links to pages."""
    origin = origin_of(page)
    ups = "../" * (len(PurePosixPath(page).parts) - 1)

    def link(found: re.Match[str]) -> str:
        return f"{ups}{page_of(_target(found[1], origin))}{found[2]}"

    parts = _FENCED.split(text)
    return "".join(part if place % 2 else _LINK.sub(link, part) for place, part in enumerate(parts))


def text_of(path: PurePosixPath) -> str:
    """Return a file of the repository as Markdown, with links as they are in the repository; a folder as a list."""
    file = ROOT / path
    if file.is_dir():
        listed = sorted(each.relative_to(file) for each in file.rglob("*") if each.suffix in _SHOWN and each.is_file())
        return f"# {path}\n\n" + "\n".join(f"- [{each.as_posix()}]({each.as_posix()})" for each in listed) + "\n"
    text = file.read_text(encoding="utf-8")
    return text if path.suffix == ".md" else f"# {path}\n\n```{_SHOWN.get(path.suffix, '')}\n{text}```\n"


def linked_pages() -> dict[str, str]:
    """Return the text of each page that shows a file outside docs/, by the page's name."""
    pages = {name: text_of(PurePosixPath(path)) for path, name in MOVED.items()}
    waiting = [("docs" / PurePosixPath(file.relative_to(DOCS).as_posix())) for file in DOCS.rglob("*.md")]
    waiting += map(PurePosixPath, MOVED)
    while waiting:
        origin = waiting.pop()
        for path in links_of(text_of(origin), origin):
            page = page_of(path)
            if not path.is_relative_to("docs") and page not in pages:
                pages[page] = text_of(path)
                waiting.append(path)
    return pages


def commands() -> str:
    """Return the reference of the commands, in the words of their ``--help``."""
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from actbench.cli.app import app

    group = get_command(app)
    text = get_docs_for_click(
        obj=group, ctx=group.make_context("actbench", ["doctor"]), name="actbench", title="Commands"
    )
    return "\n\n".join(map(_example, text.split("\n\n")))


def _example(paragraph: str) -> str:
    """Return a paragraph of examples as a block of code, and every other as it is."""
    line = " ".join(paragraph.split())
    if not line.startswith(("Example: ", "Examples: ")):
        return paragraph
    return "```console\n" + "\n".join(f"$ {each}" for each in line.partition(": ")[2].split(" · ")) + "\n```"


def methods() -> str:
    """Return the reference of the methods, from their classes and cards."""
    from actbench.cli.described import texts

    rows = [(f"[`{words.form}`](#{name})", words.changes, words.title) for name, words in texts().items()]
    text = [
        "# Methods",
        (
            "What `actbench schemes` and `actbench schemes NAME` print. A specification joins methods by `+`: "
            "`lora:16+checkpoint`."
        ),
        _table(("method", "changes", "what it does"), rows),
    ]
    for name, words in texts().items():
        text += [f"## `{words.form}` {{ #{name} }}", _escaped(words.summary)]
        text += [_table(("", ""), [(f"**{title}**", _escaped(fact)) for title, fact in words.facts.items()])]
        text += [_table(header, [tuple(map(_escaped, row)) for row in rows]) for header, rows in words.tables]
    return "\n\n".join(text) + "\n"


def messages() -> str:
    """Return every message of an error that the source raises on purpose, by its class and its place."""
    from actbench import errors

    classes = {name: kind for name, kind in vars(errors).items() if getattr(kind, "__module__", "") == errors.__name__}
    raised: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for file in sorted((ROOT / "src" / "actbench").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        texts = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(call := node.exc, ast.Call) and call.args:
                name = ast.unparse(call.func).rpartition(".")[2]
                if name in classes:
                    place = f"{file.relative_to(ROOT / 'src' / 'actbench')}:{node.lineno}"
                    raised[name].append((place, _message(call.args[0], texts)))
    text = [
        "# Messages",
        (
            "Each error that actbench raises on purpose, as the source has it: `{…}` is what was found. A message says "
            "what was asked, what was found and what to do."
        ),
    ]
    for name, kind in classes.items():
        if name in raised:
            text += [f"## {name}", _escaped((kind.__doc__ or "").partition("\n")[0])]
            text += [
                _table(
                    ("message", "where"),
                    [(_escaped(" ".join(said.split())), f"`{place}`") for place, said in raised[name]],
                )
            ]
    return "\n\n".join(text) + "\n"


def _message(node: ast.expr, texts: Mapping[str, ast.expr]) -> str:
    """Return the text of a message, with what is filled in as its expression in braces."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_message(part, texts) for part in parts)
        case ast.FormattedValue(value=found):
            return f"{{{ast.unparse(found)}}}"
        case ast.BinOp(left=left, right=right, op=ast.Add()):
            return _message(left, texts) + _message(right, texts)
        case ast.Name(id=name) if name in texts:
            return _message(texts[name], texts)
        case ast.Call(func=ast.Attribute(value=template, attr="format")):
            return _message(template, texts)
    return f"{{{ast.unparse(node)}}}"


def _escaped(text: str) -> str:
    return re.sub(r"([*_<>|`\[\]])", r"\\\1", text)


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = (header, ("---",) * len(header), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def on_config(config: Any) -> Any:
    """List the decisions in the navigation: a new one need not be named in mkdocs.yml."""
    for entry in config.nav:
        if "Decisions" in entry:
            entry["Decisions"] = [f"decisions/{file.name}" for file in sorted((DOCS / "decisions").glob("*.md"))]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    from mkdocs.structure.files import File, InclusionLevel

    made = {**linked_pages(), "reference/commands.md": commands(), "reference/methods.md": methods()}
    made["reference/messages.md"] = messages()
    for page, text in made.items():
        hidden = InclusionLevel.NOT_IN_NAV if page.startswith("source/") else InclusionLevel.INCLUDED
        files.append(File.generated(config, page, content=text, inclusion=hidden))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files of the repository lead to their pages."""
    return markdown if page.file.src_uri.startswith("reference/") else relinked(markdown, page.file.src_uri)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that loads anything from elsewhere: the site is read without a network."""
    if found := re.search(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?https?://[^>]*>", output):
        raise ValueError(f"{page.file.src_uri} loads from elsewhere: {found[0]}")
    return output


def on_page_content(html: str, **_: Any) -> str:
    """Take the roles and the double colons of docstrings out, which Markdown does not know."""
    html = re.sub(r":(?:attr|class|data|func|meth|mod):(?=<code>)", "", html)
    html = re.sub(r"<p>::</p>|(?<=\.)\s+::(?=</p>)", "", html)
    return html.replace("::</p>", ":</p>")
