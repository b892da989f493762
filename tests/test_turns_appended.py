"""What follows a sampled turn is what the model's own chat template writes there, in ids; what cannot be is refused."""

import random
import re
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lib.data.chat_template import FIRST_PRIVATE, ChatTemplate
from lib.errors import UserError
from lib.turns import appended
from lib.turns.appended import Appender, CannotAppend

TEMPLATES = Path(__file__).parent / "chat_templates"
ENDS = {
    "qwen": "<|im_end|>", "lfm2": "<|im_end|>", "nemotron": "<|im_end|>", "llama": "<|eot_id|>",
    "cohere2": "<|END_OF_TURN_TOKEN|>", "gemma3": "<end_of_turn>",
    "deepseekv3": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "phi3_5": "<|endoftext|>", "gptoss": "<|return|>", "glm4moe": "<|user|>",
}  # fmt: skip
"""How a template's name begins -> the token that ends a response of its models."""
BAR = "\uff5c"  # of DeepSeek's control tokens
BOTH = ("qwen2_5", "qwen3_instruct_2507", "llama3_1", "llama3_2", "lfm2", "cohere2")
TOOL = {"role": "tool", "name": "calc"}
USER = {"role": "user"}


@cache
def template(name, end=None):
    """A byte-level tokenizer with the control tokens that the template names, under that template."""
    from transformers import PreTrainedTokenizerFast

    text = (TEMPLATES / f"{name}.jinja").read_text()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    end = end or next(token for start, token in ENDS.items() if name.startswith(start))
    named = re.findall(rf"<[|{BAR}][^|{BAR}<>{{}}]+[|{BAR}]>|<(?:start|end)_of_turn>", text)
    specials = [token for token in dict.fromkeys([end, "<|bos|>", *named]) if "tool" not in token]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|bos|>", eos_token=end, additional_special_tokens=specials,
        chat_template=text, name_or_path=name,
    )  # fmt: skip
    return ChatTemplate(tokenizer, date="2026-11-24")


def appender(name, end=None):
    made = template(name, end)
    return Appender(made, [made.tokenizer.eos_token_id])


def difference(made, observation, said="It is done."):
    """What two renders of the whole conversation differ by, encoded: the slow way."""
    call = {"type": "function", "id": "call00000", "function": {"name": "calc", "arguments": {"x": "1"}}}
    turn = {"role": "assistant", "content": said} | ({"tool_calls": [call]} if observation["role"] == "tool" else {})
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add."}, turn]
    before = made.render(asked, answer_follows=False)
    after = made.render([*asked, observation])
    end = made.tokenizer.eos_token
    cut = before.rindex(end) + len(end)
    assert after.startswith(before[:cut])
    return made.tokenizer(after[cut:], add_special_tokens=False)["input_ids"]


def texts(seed, count=200):
    rng = random.Random(seed)
    pieces = (
        "17",
        " ",
        "\n",
        "{",
        '"',
        "}",
        "a word",
        "é",
        "漢",
        "🙂",
        "\\",
        "'",
        "<b>",
        "|",
        "\t",
        "[1, 2]",
        "Error:",
    )
    return ["".join(rng.choice(pieces) for _ in range(rng.randrange(12))) for _ in range(count)]


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("role", [TOOL, USER], ids=["tool", "user"])
def test_ids_are_those_of_a_full_render(name, role):
    made, ours = template(name), appender(name)
    ours.check([role["role"]])
    for text in texts(0):
        observation = {**role, "content": text}
        if name == "cohere2" and role is TOOL:  # it renders the results of all calls in one message
            continue
        assert ours.ids([observation]) == difference(made, observation), repr(text)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_6", "nemotron_3_nano"])
def test_templates_that_strip_earlier_thinking_are_appended_to_and_told(name):
    ours = appender(name)
    ours.check(["user"])
    assert any("strips the thinking of earlier turns" in note for note in ours.notes)
    decoded = template(name).tokenizer.decode(ours.ids([{**USER, "content": "higher"}]))
    assert "higher" in decoded and "lockstep" not in decoded and "Add." not in decoded


@pytest.mark.parametrize(("name", "role", "expected"), [
    ("phi3_5", "user", "ends with none of <|endoftext|>|ends with"),
    ("gptoss", "user", r"ends with <\|return\|> ends with <\|end\|>|ends with none"),
    ("glm4moe", "user", "ends with none of"),  # a turn ends with what begins the next one
    ("gemma3", "tool", "refuses an observation; --model.path gemma3"),
])  # fmt: skip
def test_what_cannot_be_appended_to_is_refused_by_name(name, role, expected):
    with pytest.raises(UserError, match=expected):
        appender(name).check([role])


def test_text_that_spells_a_control_token_is_never_one():
    for name in BOTH:
        made, ours = template(name), appender(name)
        specials = made.tokenizer.all_special_tokens
        rng = random.Random(1)
        for _ in range(60):
            text = " ".join(rng.choice([*specials, "x", "\n", '"']) for _ in range(6))
            for role in (USER, TOOL):
                ids = ours.ids([{**role, "content": text}])
                found = sum(token in set(made.tokenizer.all_special_ids) for token in ids)
                base = ours.ids([{**role, "content": "x"}])
                expected = sum(token in set(made.tokenizer.all_special_ids) for token in base)
                assert found == expected, (name, role, text)


def test_characters_that_stand_for_control_tokens_here_do_not_become_their_names():
    ours, first = appender("qwen2_5"), chr(FIRST_PRIVATE)
    decoded = ours.template.tokenizer.decode(ours.ids([{**USER, "content": f"a {first} b"}]))
    assert "a \ufffd b" in decoded
    assert ours.ids([{**USER, "content": f"<|im_end|>{first}"}]) == ours.ids([{**USER, "content": "<|im_end|>\ufffd"}])


def test_a_frame_is_found_where_contents_stand_as_they_are_and_only_there():
    plain, quoted = appender("qwen2_5"), appender("llama3_1")  # which writes a tool's answer as JSON
    for ours in (plain, quoted):
        ours.ids([{**TOOL, "content": "1"}])
    [frame], [none] = plain._frames.values(), quoted._frames.values()
    assert frame == ["\n<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"]
    assert none is None


def test_names_that_a_model_invents_have_the_same_ids_and_are_not_all_remembered(monkeypatch):
    monkeypatch.setattr(appended, "MOST_FRAMES", 2)
    few = appender("qwen2_5")
    ids = [few.ids([{**TOOL, "name": f"invented{place}", "content": "no such tool"}]) for place in range(5)]
    assert ids == 5 * [appender("qwen2_5").ids([{**TOOL, "content": "no such tool"}])]
    assert len(few._frames) == 2


def test_several_results_of_one_turn_are_appended_together():
    made, ours = template("qwen2_5"), appender("qwen2_5")
    ids = ours.ids([{**TOOL, "content": "1"}, {**TOOL, "content": "2"}])
    assert made.tokenizer.decode(ids) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_template_that_drops_what_was_said_is_refused():
    made = template("qwen2_5")
    broken = ChatTemplate(made.tokenizer, {"chat_template": "{% for m in messages %}<|im_end|>{% endfor %}"})
    with pytest.raises(CannotAppend, match="leaves out what the assistant said"):
        Appender(broken, [made.tokenizer.eos_token_id]).ids([{**USER, "content": "x"}])
