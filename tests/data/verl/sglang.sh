set -x
if [ "$NODES" = 2 ]; then
    BATCH=512
else
    BATCH=64
fi
EXTRA="trainer.save_freq=20 trainer.test_freq=5"

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=reinforce_plus_plus \
    data.train_files=/data/train.parquet data.val_files=/data/test.parquet \
    data.train_batch_size=$BATCH \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.n=2 \
    algorithm.use_kl_in_reward=True \
    trainer.experiment_name="run_$(date +%m%d)" \
    trainer.logger=console trainer.total_training_steps=10 $EXTRA $UNSET_OPTIONS
