import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, think_format_reward

MODEL_ID = "Qwen/Qwen2.5-3B-Instruct"
NUM_GENERATIONS = 4


def make_conversation(row):
    return {"prompt": [{"role": "user", "content": row["problem"]}]}


def main():
    train_dataset, eval_dataset = load_dataset("AI-MO/NuminaMath-TIR", split=["train[:5%]", "test[:5%]"])
    train_dataset = train_dataset.map(make_conversation)
    training_args = GRPOConfig(
        output_dir="Qwen2.5-3B-GRPO",
        learning_rate=1e-5,
        num_generations=NUM_GENERATIONS,
        max_completion_length=1024,
        max_prompt_length=256,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        max_steps=200,
        warmup_ratio=0.1,
        lr_scheduler_type="cosine",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.4,
        vllm_tensor_parallel_size=2,
        bf16=torch.cuda.is_bf16_supported(),
        report_to=["wandb", "trackio"],
        run_name="numina",
    )
    trainer = GRPOTrainer(
        model=MODEL_ID,
        reward_funcs=[think_format_reward, accuracy_reward],
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=LoraConfig(r=64, lora_alpha=128, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
