import argparse

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--learning_rate", type=float, default=2e-4)
args = parser.parse_args()

model_name: str = "facebook/opt-350m"
model = AutoModelForCausalLM.from_pretrained(model_name, device_map="auto")
tokenizer = AutoTokenizer.from_pretrained(model_name)
dataset = load_dataset("stanfordnlp/imdb", "plain_text")

peft_config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], bias="none")
sft_config = SFTConfig(
    "/tmp/opt-sft",
    learning_rate=args.learning_rate,
    max_length=512,
    packing=True,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    num_train_epochs=1,
    save_strategy="epoch",
    optim="adamw_torch_fused",
)
trainer = SFTTrainer(
    model,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    args=sft_config,
    peft_config=peft_config,
    processing_class=tokenizer,
)
trainer.train()
