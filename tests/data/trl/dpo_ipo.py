import trl
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

BETA = 0.05
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B-Instruct", dtype="bfloat16")
reference = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B-Instruct")
model = get_peft_model(model, LoraConfig(r=8))
dataset = load_dataset("trl-lib/ultrafeedback_binarized", split="train").shuffle(seed=3).select(range(1000))

trainer = trl.DPOTrainer(
    model=model,
    ref_model=reference,
    args=trl.DPOConfig(
        output_dir="ipo",
        beta=BETA,
        loss_type="ipo",
        learning_rate=5e-7,
        per_device_train_batch_size=4,
        max_steps=300,
        warmup_ratio=0.1,
        eval_strategy="steps",
        eval_steps=50,
        report_to="none",
    ),
    train_dataset=dataset,
)
trainer.train()
