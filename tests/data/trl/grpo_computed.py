import os

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

STEPS = 50
RATE = 1e-6
RATE = RATE * 2
COMMON = {"output_dir": "out", "seed": 1}

for beta in (0.0, 0.04):
    trainer = GRPOTrainer(
        os.environ.get("MODEL", "Qwen/Qwen2-0.5B"),
        reward_funcs=lambda completions, **kwargs: [float(len(set(each))) for each in completions],
        args=GRPOConfig(**COMMON, max_steps=STEPS, learning_rate=RATE, beta=beta, loss_type="dr_grpo"),
        train_dataset=Dataset.from_list([{"prompt": "The sky is"}] * 64),
    )
    trainer.train()
