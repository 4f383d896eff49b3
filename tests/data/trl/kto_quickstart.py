from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import KTOConfig, KTOTrainer

MODEL = "Qwen/Qwen2-0.5B-Instruct"
model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
dataset = load_dataset("trl-lib/kto-mix-14k")
training_args = KTOConfig(
    output_dir="Qwen2-0.5B-KTO", beta=0.2, desirable_weight=1.33, per_device_train_batch_size=8, max_steps=20
)
trainer = KTOTrainer(model=model, args=training_args, processing_class=tokenizer, train_dataset=dataset["train"])
trainer.train()
