"""Read a chat template from a file, and say what is wrong with it before it is used."""

from __future__ import annotations

from pathlib import Path

from vllm_mlx.engine.errors import UsageError


def read_chat_template(path: Path) -> str:
    """Return the template in `path`; raise `UsageError` if it cannot be read or is no Jinja."""
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"the chat template {path} cannot be read: {reason}") from error
    if not template.strip():
        raise UsageError(f"the chat template {path} is empty")
    from jinja2 import Environment, TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    class Generation(Extension):
        """Know the block that marks what the model itself wrote, as transformers does."""

        tags = {"generation"}  # noqa: RUF012 - the library declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            """Return what the block holds."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        Environment(extensions=[Generation, loopcontrols], autoescape=False).parse(template)
    except TemplateSyntaxError as error:
        raise UsageError(
            f"the chat template {path} is no Jinja template: line {error.lineno}: {error.message}"
        ) from error
    return template
