"""Lines that agents change with each request: taken out of system text, and of nothing else."""

from __future__ import annotations

import pytest

from vllm_mlx.server.anthropic.chat_input import ChatSettings, chat_input
from vllm_mlx.server.anthropic.schemas import MessagesBody
from vllm_mlx.server.anthropic.volatile import without_volatile_lines

BILLING = "x-anthropic-billing-header: cc_version=2.1.117.48f; cc_entrypoint=cli; cch=71fea;"
BUDGET = "<total_tokens>14999436 tokens left</total_tokens>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Be brief.", "Be brief."),
        (BILLING, ""),
        (f"{BILLING}\nBe brief.", "Be brief."),
        (f"Be brief.\n{BILLING}\nAnd kind.", "Be brief.\nAnd kind."),
        (f"{BILLING}\n{BILLING.replace('71fea', '00000')}\nBe brief.", "Be brief."),
        (BUDGET, ""),
        (f"Be brief.\n{BUDGET}", "Be brief."),
        (f"Be brief.\n{BUDGET}\n\n{BUDGET}\n{BUDGET}", "Be brief."),
        (f"{BUDGET}\nBe brief.", "Be brief."),
        (f"Be brief.\n{BUDGET}\nAnd kind.", "Be brief.\nAnd kind."),
        (f"{BILLING}\nBe brief.\n{BUDGET}", "Be brief."),
        (f"One {BUDGET} two\n {BUDGET}\nthree", "One two\nthree"),
        # What only speaks of them stays.
        ("Never write x-anthropic-billing-header: lines.",) * 2,
        ("<usage><total_tokens>120</total_tokens></usage>",) * 2,
        ("Say how many <total_tokens> there are.",) * 2,
        ("\n\nBe brief.\n",) * 2,
    ],
)
def test_only_whole_lines_of_these_forms_go(text: str, expected: str) -> None:
    """However often they are there, the same text is left."""
    assert without_volatile_lines(text) == expected
    assert without_volatile_lines(expected) == expected


def test_long_runs_of_white_space_take_no_time() -> None:
    """A text of a megabyte is looked through once."""
    text = f"Be brief.{' ' * 500_000}{BUDGET}{chr(10) * 500_000}<total_tokens>"
    assert without_volatile_lines(text) == f"Be brief.{chr(10) * 500_000}<total_tokens>"


def body_of(checksum: str, left: int) -> MessagesBody:
    """Return a request whose user quotes what its agent writes."""
    return MessagesBody.model_validate(
        {
            "max_tokens": 1,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cch={checksum};"},
                {"type": "text", "text": "Be brief."},
            ],
            "messages": [
                {"role": "user", "content": f"What is this?\n{BILLING}\n{BUDGET}"},
                {"role": "assistant", "content": f"It is {BUDGET}"},
                {"role": "user", "content": "Go on."},
                {
                    "role": "system",
                    "content": f"<total_tokens>{left} tokens left</total_tokens>",
                },
            ],
        }
    )


def test_two_requests_that_differ_in_them_alone_have_one_prompt() -> None:
    """A block and a message that hold nothing else go with them; what users say is untouched."""
    first, second = (
        chat_input(body_of(checksum, left), ChatSettings())
        for checksum, left in (("aaaaa", 9000), ("bbbbb", 8000))
    )
    assert first.messages == second.messages
    assert [message["role"] for message in first.messages] == [
        *("system", "user", "assistant", "user")
    ]
    assert first.messages[0]["content"] == "Be brief."
    assert first.messages[1]["content"] == f"What is this?\n{BILLING}\n{BUDGET}"
    assert first.messages[2]["content"] == f"It is {BUDGET}"


def test_they_can_be_left_in() -> None:
    """Without normalizing the prompt is what was sent."""
    chat = chat_input(body_of("aaaaa", 9000), ChatSettings(normalize=False))
    assert chat.messages[0]["content"] == "x-anthropic-billing-header: cch=aaaaa;\nBe brief."
    assert "<total_tokens>9000 tokens left" in chat.messages[-1]["content"]
