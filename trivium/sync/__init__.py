"""Channels that carry weights from the trainer to the explorers; `runtime.build` chooses one."""
