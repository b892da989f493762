"""Every fault of a critic's folder has its own message, also where it starts from the policy's."""

import shutil
from pathlib import Path

import pytest

from lib.errors import UserError
from lib.storage.model_folder import check_critic_files, value_head
from tests.model_folders import CONFIG, check, expected_shapes, message, safetensors, with_tensors, write, write_folder

CRITIC = CONFIG | {"architectures": ["Qwen3ForTokenClassification"], "id2label": {"0": "LABEL_0"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def critic_shapes(config: dict) -> dict:
    """Of a critic with these sizes."""
    return expected_shapes(config | {"tie_word_embeddings": True}) | value_head(config)


@pytest.fixture
def critic(folder: Path) -> Path:
    """A saved critic beside the policy: no tokenizer."""
    critic = folder.parent / "critic"
    critic.mkdir()
    write(critic / "config.json", CRITIC)
    (critic / "model.safetensors").write_bytes(safetensors(critic_shapes(CRITIC)))
    return critic


def check_critic(path: Path | str, policy: Path):
    return check_critic_files(str(path), check(policy), max_prompt_len=32, max_response_len=32)


def critic_message(path: Path | str, policy: Path) -> str:
    with pytest.raises(UserError) as caught:
        check_critic(path, policy)
    text = str(caught.value)
    assert text.count(";") >= 2, f"not what; where; found; remedy: {text}"
    return text


def test_a_critic_starts_from_the_policys_folder_another_model_or_a_saved_critic(folder: Path, critic: Path) -> None:
    num_parameters = check(folder).num_parameters + CONFIG["hidden_size"] + 1  # of the head; the policy's is tied
    other = folder.parent / "other"
    shutil.copytree(folder, other)
    (other / "tokenizer.json").unlink()
    untied = CONFIG | {"tie_word_embeddings": False}
    write(other / "config.json", untied)
    (other / "model.safetensors").write_bytes(safetensors(expected_shapes(untied)))
    stray = shutil.copytree(other, folder.parent / "stray")  # a head that no critic has may be any
    with_tensors(stray, {"lm_head.weight": (32, 16)}, embedding=0.5, head=0.25)
    for path, found in {"": folder, folder: folder, other: other, critic: critic, stray: stray}.items():
        files = check_critic(path, folder)
        assert (files.folder, files.num_parameters) == (found, num_parameters)
    without_bias = critic_shapes(CRITIC)
    del without_bias["score.bias"]
    (critic / "model.safetensors").write_bytes(safetensors(without_bias))
    check_critic(critic, folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vocab_size": 48}, ("--critic.model.path", "vocab_size=48", "the policy's 32")),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, ("found 3 labels", "num_labels=1")),
        ({"id2label": None}, ("found 2 labels", "num_labels=1")),
        ({"architectures": ["GPT2ForTokenClassification"]}, ("unsupported", "Qwen3")),
        ({"model_type": "llama"}, ("Qwen3ForTokenClassification", "'llama'", "'qwen3'")),
        ({"max_position_embeddings": 63}, ("32 = 64", "=63")),
        ({"intermediate_size": 23}, ("gate_proj", "[24, 16]", "[23, 16]")),
        ({"hidden_size": 15}, ("[32, 16]", "[32, 15]")),
    ],
)
def test_a_critic_that_does_not_fit_names_what(folder: Path, critic: Path, changes: dict, expected: tuple) -> None:
    write(critic / "config.json", CRITIC | changes)
    text = critic_message(critic, folder)
    assert all(part in text for part in expected), text


def test_a_critic_without_its_head_or_that_is_not_there_is_refused(folder: Path, critic: Path) -> None:
    (critic / "model.safetensors").write_bytes(safetensors(expected_shapes(CONFIG)))
    assert "score.weight" in critic_message(critic, folder)
    assert "--critic.model.path" in critic_message(critic / "gone", folder)
    (critic / "config.json").unlink()
    write(critic / "adapter_config.json", {})
    assert "--critic.model.path is an adapter" in critic_message(critic, folder)


@pytest.mark.parametrize(("name", "shape"), [("score.weight", (2, 16)), ("score.weight", (16,)), ("score.bias", (2,))])
def test_a_head_of_another_shape_is_refused_also_where_it_may_be_left_out(
    folder: Path, critic: Path, name: str, shape: tuple
) -> None:
    for path, shapes in ((critic, critic_shapes(CRITIC)), (folder, expected_shapes(CONFIG))):
        (path / "model.safetensors").write_bytes(safetensors(shapes | {name: shape}))
        text = critic_message(path, folder)
        assert f"{name} in {path}; found {list(shape)}, expected" in text, text
    assert name in critic_message("", folder)


def test_a_critic_is_no_policy(critic: Path) -> None:
    assert "Qwen3ForTokenClassification" in message(critic)
