"""TRL's GRPOTrainer on a workload of recipes/bench.py, with peft's LoRA or all weights: seconds of a step, mismatch.

    pip install trl==1.16.0 datasets==5.2.0                     # beside requirements.txt; tested with vllm 0.26.0
    python -m recipes.peers.trl_bench --workload P1 --lora-rank 32
    torchrun --nproc_per_node=1 -m recipes.bench --workload P1 --lora-rank 32      # ours, on the same GPU

The model, the prompts, the lengths and the rewards are bench's. TRL merges the adapter into bfloat16 weights for its
engine and trains unmerged; what it logs as sampling_logp_difference is what ours calls training/rollout_log_probs_diff.
The first step warms up. The engine keeps its memory beside the trainer unless --sleep True.
"""

import json
import shutil
import time
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from lib.config import parse_cli, reporting_errors
from lib.data import load_tokenizer
from lib.tracking.console import format_table
from recipes.bench import WORKLOADS, make_folder, write_inputs
from recipes.hash_reward import compute_score


@dataclass(frozen=True, kw_only=True)
class PeerBenchConfig:
    workload: Literal["tiny", "P1", "P3"] = "P1"
    """As that of recipes/bench.py; one whose responses all have the same length."""
    lora_rank: int = 32
    """Rank of peft's adapter on all linear layers, alpha 32; 0: all weights."""
    steps: int = 3
    """Measured steps."""
    micro_batch_size: int = 16
    """Responses in one forward or backward pass."""
    gpu_memory_utilization: float = 0.4
    """Share of a GPU's memory for the engine."""
    sleep: bool = False
    """Free the engine's memory during the update."""


PeerBenchConfig.__doc__ = __doc__


def main(cfg: PeerBenchConfig) -> None:
    """Prints a line for each step, a table, and a JSON line."""
    import torch

    folder = make_folder(f"trl-{cfg.workload}")
    try:
        write_inputs(WORKLOADS[cfg.workload], folder, num_prompts=WORKLOADS[cfg.workload].prompts)
        rows = measure(cfg, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    kept = rows[1:]
    names = [name for name in rows[0] if name != "step"]
    table = [(name, f"{median(row[name] for row in kept):.4g}", f"{max(row[name] for row in kept):.4g}")
             for name in names]  # fmt: skip
    print(format_table((f"TRL, {cfg.workload}, rank {cfg.lora_rank}", "median", "max"), table))
    print(json.dumps({"peer": "trl", "workload": cfg.workload, "lora_rank": cfg.lora_rank, "device": device,
                      "torch": torch.__version__, "steps": rows}))  # fmt: skip


def measure(cfg: PeerBenchConfig, folder: str) -> list[dict[str, float]]:
    """A row for each step, the one that warms up too."""
    import pyarrow.parquet
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows: list[dict[str, float]] = []

    class Recorder(TrainerCallback):
        since, step_s = 0.0, 0.0

        def now(self) -> float:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return time.perf_counter()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.since = self.now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.step_s = self.now() - self.since

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "reward" in logs:
                peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
                gap = {
                    f"mismatch_{name.rpartition('/')[2]}": float(it) for name, it in logs.items() if "logp_d" in name
                }
                rows.append({"step": state.global_step, "step_s": self.step_s, "grad_norm": float(logs["grad_norm"]),
                             "peak_allocated_gib": peak, **gap})  # fmt: skip
                print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(compute_score("", it[0]["content"], "", {})) for it in completions]

    prompts = pyarrow.parquet.read_table(f"{folder}/prompts.parquet", columns=["prompt"]).column("prompt").to_pylist()
    peft = LoraConfig(r=cfg.lora_rank, lora_alpha=32, target_modules="all-linear") if cfg.lora_rank else None
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32), reward_funcs=reward,
        args=GRPOConfig(**settings_of(cfg, folder, on_gpu=torch.cuda.is_available())), callbacks=[Recorder()],
        train_dataset=Dataset.from_list([{"prompt": it} for it in prompts]), peft_config=peft,
        processing_class=load_tokenizer(f"{folder}/model"),
    )  # fmt: skip
    trainer.train()
    return rows


def settings_of(cfg: PeerBenchConfig, folder: str, *, on_gpu: bool) -> dict[str, Any]:
    """GRPOConfig's arguments: one optimizer step on the responses of one rollout, as bench's."""
    workload = WORKLOADS[cfg.workload]
    responses = workload.prompts * workload.n
    micro = min(cfg.micro_batch_size, responses)
    return dict(
        num_generations=workload.n,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=responses // micro,
        max_steps=cfg.steps + 1,
        shuffle_dataset=False,
        loss_type="dapo",
        beta=0.0,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        bf16=on_gpu,
        gradient_checkpointing=False,
        temperature=1.0,
        max_completion_length=workload.response_len,
        generation_kwargs={"ignore_eos": True},
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=cfg.gpu_memory_utilization,
        vllm_enable_sleep_mode=cfg.sleep,
        vllm_max_model_length=256 + workload.response_len,
        output_dir=f"{folder}/trl",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not on_gpu,
    )


if __name__ == "__main__":
    with reporting_errors():
        main(parse_cli(PeerBenchConfig()))
