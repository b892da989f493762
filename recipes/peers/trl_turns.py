"""TRL's tool loop on the episodes of recipes/bench_turns.py: the same shape, lengths, latencies and number of turns.

    pip install trl==1.16.0 datasets==5.2.0 jmespath==1.1.0     # beside requirements.txt; tested with vllm 0.26.0
    python -m recipes.peers.trl_turns                           # on one GPU; then recipes.bench_turns on the same one

What is timed is `GRPOTrainer._generate` as it stands, with its engine in the same process: it samples, decodes, calls
`tools=[wait]` and goes on. It is called by the trainer's own first step, as often as there are rows; then the run ends,
nothing is trained. A model with random weights calls no tool. So one name is replaced: what reads a turn, TRL's
`parse_response`, decodes it as ever and says that it calls `wait`. The number of turns is TRL's own limit on them, the
length of a turn vLLM's `max_tokens` with `ignore_eos`. Prompts are digits, one token each.

TRL calls the tools of different episodes one after another, so that L1 takes the sum of all latencies, a third of an
hour. It is measured on some prompts, all of whose responses it samples; of all of them it is summed up from L0.
"""

import json
import random
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

from lib.config import parse_cli, reporting_errors
from lib.data import ChatTemplate, load_tokenizer, stop_token_ids
from lib.errors import UserError
from lib.tracking.console import format_table
from recipes import bench_turns, make_random_model

CALLS = "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
CHAT_TEMPLATE = make_random_model.CHAT_TEMPLATE.replace("<|im_end|>", CALLS + "<|im_end|>")
"""TRL refuses one that does not show calls."""


@dataclass(frozen=True, kw_only=True)
class PeerTurnsConfig:
    workload: Literal["tiny", "1.7b"] = "1.7b"
    """As that of recipes/bench_turns.py."""
    prompts: int | None = None
    """Instead of the workload's, for a GPU whose memory does not hold all episodes."""
    l1_prompts: int = 2
    """Of those, how many L1 is measured on; 0: it is not."""
    gpu_memory_utilization: float = 0.7
    """Share of a GPU's memory for the engine; the trainer's float32 weights lie beside it."""
    seed: int = 0
    """Of the latencies, as bench_turns', and of the prompts."""


PeerTurnsConfig.__doc__ = __doc__


class Measured(Exception):
    """All rows have been: there is nothing to train."""


class Tool:
    """The tool, and how long each of its calls takes: in the order of turns, and in a turn of episodes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.to_come: list[float] = []

    def wait(self) -> str:
        """Answers after a while."""
        if self.to_come:
            time.sleep(self.to_come.pop(0))
        return self.text


def main(cfg: PeerTurnsConfig) -> None:
    """Prints a line for each row, and a table."""
    import torch

    workload = bench_turns.WORKLOADS[cfg.workload]
    workload = replace(workload, prompts=cfg.prompts or workload.prompts)
    if not 0 <= cfg.l1_prompts <= workload.prompts:
        raise UserError(
            f"--l1-prompts is out of range; found {cfg.l1_prompts}, expected 0 to {workload.prompts}; change it"
        )
    folder = tempfile.mkdtemp(prefix="lockstep-trl-turns-")
    try:
        bench_turns.write_texts(folder)
        shape = make_random_model.RandomModelConfig(
            shape=workload.shape, texts=f"{folder}/texts.parquet", out=f"{folder}/model"
        )
        make_random_model.main(shape)
        rows = measure(cfg, workload, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(format_table(("row", "seconds", "tokens/s"), [(it["row"], f"{it['wall_s']:.2f}", f"{it['tokens_per_s']:,.0f}")
                                                        for it in rows]))  # fmt: skip
    print(json.dumps({"peer": "trl", "workload": cfg.workload, "device": device, "torch": torch.__version__,
                      "rows": rows}))  # fmt: skip


def measure(cfg: PeerTurnsConfig, workload: bench_turns.Workload, folder: str) -> list[dict[str, Any]]:
    """The rows, each of which is printed as soon as it has been measured."""
    from trl import GRPOTrainer
    from trl.trainer import grpo_trainer

    tokenizer = load_tokenizer(f"{folder}/model")
    tokenizer.chat_template = CHAT_TEMPLATE
    template = ChatTemplate(tokenizer)
    tokenizer.response_schema = {}  # the random model's template is none that TRL knows; what reads turns is replaced
    stop_ids = stop_token_ids(tokenizer, f"{folder}/model")
    tool = Tool(bench_turns.observed_text(template, stop_ids, workload.observed_len, role="tool"))
    every = bench_turns.draw_latencies(workload, cfg.seed)["l1"]
    rows: list[dict[str, Any]] = []

    def parse(tokenizer: Any, ids: list[int], **_: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "wait", "arguments": {}}}
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return {"role": "assistant", "content": text, "tool_calls": [call]}

    class Trainer(GRPOTrainer):
        def row(self, name: str, prompts: list[Any], latencies: list[list[float]]) -> float:
            """TRL's episodes of a prompt are neighbours, and so are its calls of a turn."""
            tool.to_come = [own[turn] for turn in range(workload.turns - 1) for own in latencies]
            self.vllm_generation.llm.reset_prefix_cache()
            started = time.perf_counter()
            _, completions, mask, *_ = super()._generate(prompts)
            wall_s = time.perf_counter() - started
            whole = workload.turns * workload.turn_len
            found = {(len(ids), sum(own)) for ids, own in zip(completions, mask, strict=True)}
            assert found == {(workload.response_len, whole)}, f"{found} instead of {workload.response_len}, {whole}"
            tell(name, wall_s, len(prompts))
            return wall_s

        def _generate(self, prompts: list[Any]) -> Any:
            self._last_loaded_step = self.state.global_step  # the engine has read the same weights from the folder
            self.row("warm-up, not to be counted", prompts[: workload.n], [])
            l0_s = self.row("L0", prompts, [])
            per_prompt = [[every[prompt * workload.n + k] for k in range(workload.n)]
                          for prompt in range(workload.prompts)]  # fmt: skip
            if cfg.l1_prompts:
                some = [own for of_prompt in per_prompt[: cfg.l1_prompts] for own in of_prompt]
                self.row(f"L1 of {cfg.l1_prompts} prompts", prompts[: len(some)], some)
            tell("L1, L0 and all latencies summed up", l0_s + sum(map(sum, every.values())), len(prompts))
            raise Measured

    def tell(name: str, wall_s: float, num_episodes: int) -> None:
        tokens = num_episodes * workload.turns * workload.turn_len
        rows.append({"row": name, "wall_s": wall_s, "tokens_per_s": tokens / wall_s, "episodes": num_episodes})
        print(f"{name}: {num_episodes} episodes, {wall_s:.2f} s, {tokens / wall_s:,.0f} tokens/s", flush=True)

    grpo_trainer.parse_response = parse
    trainer = make_trainer(Trainer, cfg, workload, folder, tokenizer, template, tool)
    try:
        trainer.train()
    except Measured:
        return rows
    raise AssertionError("the trainer's first step sampled nothing")


def make_trainer(
    kind: type, cfg: PeerTurnsConfig, workload: bench_turns.Workload, folder: str, tokenizer: Any,
    template: ChatTemplate, tool: Tool,
) -> Any:  # fmt: skip
    """A trainer whose engine holds as many episodes at once as ours."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig

    on_gpu = torch.cuda.is_available()
    frame = len(template.encode([[{"role": "user", "content": "0"}]])[0]) - 1
    rng = random.Random(cfg.seed)
    texts = ["".join(rng.choices("0123456789", k=workload.prompt_len - frame)) for _ in range(workload.prompts)]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    assert {len(ids) for ids in template.encode(conversations)} == {workload.prompt_len}
    args = GRPOConfig(
        num_generations=workload.n,
        per_device_train_batch_size=workload.n,
        gradient_accumulation_steps=workload.prompts,
        max_steps=1,
        shuffle_dataset=False,
        beta=0.0,
        bf16=on_gpu,
        gradient_checkpointing=False,
        temperature=1.0,
        max_completion_length=workload.response_len,
        max_tool_calling_iterations=workload.turns - 1,
        generation_kwargs={"max_tokens": workload.turn_len, "ignore_eos": True},
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=cfg.gpu_memory_utilization,
        vllm_max_model_length=workload.prompt_len + workload.response_len,
        seed=cfg.seed,
        output_dir=f"{folder}/trl",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not on_gpu,
    )
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
    return kind(
        model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args, tools=[tool.wait],
        train_dataset=Dataset.from_list([{"prompt": it} for it in conversations]), processing_class=tokenizer,
    )  # fmt: skip


if __name__ == "__main__":
    with reporting_errors():
        main(parse_cli(PeerTurnsConfig()))
