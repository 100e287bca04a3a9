"""TRL's GRPOTrainer with rollouts on a compressed KV cache: a script as in TRL's documentation, and one more call.

pip install 'sparse-rl[trl]'
python examples/trl_grpo.py --steps 20              # a CPU is enough: the built-in model learns running sums
python examples/trl_grpo.py --steps 40 --resume
python examples/trl_grpo.py --steps 20 --replay     # the learner sees exactly what the sampler's cache still held
"""

import argparse
import random

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from sparse_rl import load_model
from sparse_rl.integrations.trl import use_sparse_rollouts

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", default="runs/trl")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--replay", action="store_true")
options = parser.parse_args()


def problems(count: int) -> dict:
    """Sums of eight digits, and their totals."""
    draw = random.Random(0)
    sums = [[draw.randint(1, 9) for _ in range(8)] for _ in range(count)]
    return {"prompt": ["+".join(map(str, digits)) + "=" for digits in sums], "total": [sum(digits) for digits in sums]}


def right(completions, total, **_):
    """1 for a completion that ends in the sum."""
    return [float(completion.endswith(f"={known}")) for completion, known in zip(completions, total)]


model, tokenizer = load_model("tiny-sums", device="cpu")  # or AutoModelForCausalLM.from_pretrained(...)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=right,
    args=GRPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=72,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        logging_steps=1,
        save_steps=max(1, options.steps),
        use_cpu=True,
        bf16=False,
        report_to="none",
    ),
    train_dataset=Dataset.from_dict(problems(4096)),
    processing_class=tokenizer,
)
use_sparse_rollouts(trainer, compressor="rkv", budget=38, interval=4, protect_prompt=True, replay=options.replay)
trainer.train(resume_from_checkpoint=options.resume)

for log in trainer.state.log_history:
    if "loss" in log:
        print(
            f"step {log['step']}: reward {log['reward']:.2f}, "
            f"ratio {log['sampling/importance_sampling_ratio/mean']:.3f}, "
            f"rejected {log['sparse_rl/reject/trajectories/frac']:.0%}, "
            f"KV tokens saved {log['sparse_rl/kv_tokens_saved']:.0%}"
        )
