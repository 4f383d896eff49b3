export HYDRA_FULL_ERROR=1
python3 -u -m verl.trainer.main_ppo --config-name=ppo_trainer \
    algorithm.adv_estimator=remax \
    data.train_files=train.parquet \
    data.train_batch_size=512 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=4 \
    ++trainer.logger=[console] \
    trainer.total_training_steps=20 \
    > remax.log 2>&1
