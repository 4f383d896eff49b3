torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer \
    data.train_files=train.parquet \
    model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct
