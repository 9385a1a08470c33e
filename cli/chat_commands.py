"""The slash commands of the terminal chat."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from vllm_mlx.cli.chat_session import Conversation, SessionStats
from vllm_mlx.engine.errors import UsageError


@dataclasses.dataclass
class ChatState:
    """Hold what the commands read and change."""

    conversation: Conversation
    model_name: str
    stats: SessionStats = dataclasses.field(default_factory=SessionStats)
    #: Where `/save` without a name writes.
    saved_path: Path | None = None
    #: Stands in the next prompt, to be edited or sent.
    draft: str = ""
    is_over: bool = False
    now: Callable[[], datetime] = datetime.now


@dataclasses.dataclass(frozen=True)
class ChatCommand:
    """Describe one command; `run` takes what follows its name and returns what to show."""

    usage: str
    help: str
    run: Callable[[ChatState, str], str]


def run_command(line: str, state: ChatState) -> str:
    """Run the command in `line`, which starts with a slash, and return what to show.

    Raises `UsageError`, and then has changed nothing.
    """
    name, _, argument = line.strip().partition(" ")
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        raise UsageError(
            f"no command {name}; /help lists them, and a space before the slash sends it as text"
        )
    return command.run(state, argument.strip())


def _system(state: ChatState, argument: str) -> str:
    if argument == "off":
        state.conversation.system = None
        return "No system message."
    if argument:
        state.conversation.system = argument
        return "System message set."
    system = state.conversation.system
    return "No system message." if system is None else f"System message: {system}"


def _clear(state: ChatState, argument: str) -> str:
    _refuse_argument("/clear", argument)
    state.conversation.clear()
    return "Conversation cleared; the system message stays."


def _save(state: ChatState, argument: str) -> str:
    path = _path(argument) if argument else state.saved_path
    if path is None:
        path = Path(f"chat-{state.now():%Y%m%d-%H%M%S}.json")
    state.conversation.save(path, state.model_name)
    state.saved_path = path
    return f"Saved {len(state.conversation)} messages to {path}."


def _load(state: ChatState, argument: str) -> str:
    if not argument:
        raise UsageError("/load needs a file's name")
    path = _path(argument)
    state.draft = state.conversation.load(path)
    state.saved_path = path
    return f"Loaded {len(state.conversation)} messages from {path}."


def _stats(state: ChatState, argument: str) -> str:
    _refuse_argument("/stats", argument)
    return "\n".join(state.stats.lines())


def _exit(state: ChatState, argument: str) -> str:
    _refuse_argument("/exit", argument)
    state.is_over = True
    return ""


def _help(state: ChatState, argument: str) -> str:
    del state
    _refuse_argument("/help", argument)
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:{width}}  {command.help}" for command in COMMANDS.values()]
    return "\n".join([*lines, "", KEYS])


KEYS = """\
Enter sends. Alt-Enter, a backslash at the end of the line, or a block between two \"\"\" makes \
several lines.
Ctrl-C stops the answer, or clears the line; twice, or Ctrl-D, leaves."""

COMMANDS = {
    "/system": ChatCommand("/system [TEXT|off]", "show, set or remove the system message", _system),
    "/clear": ChatCommand("/clear", "forget the conversation, not the system message", _clear),
    "/save": ChatCommand("/save [FILE]", "write the conversation as JSON", _save),
    "/load": ChatCommand("/load FILE", "go on with a saved conversation", _load),
    "/stats": ChatCommand("/stats", "tokens and times of the last answer and of all", _stats),
    "/exit": ChatCommand("/exit", "leave", _exit),
    "/help": ChatCommand("/help", "this list", _help),
}
ALIASES = {"/quit": "/exit", "/?": "/help"}


def _path(argument: str) -> Path:
    return Path(argument.strip("\"'")).expanduser()


def _refuse_argument(name: str, argument: str) -> None:
    if argument:
        raise UsageError(f"{name} takes nothing after its name, but got '{argument}'")
