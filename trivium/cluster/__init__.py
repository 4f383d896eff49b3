"""The roles of a run as Ray actors, on one machine or many. The only room that imports Ray.

remote    things that live in processes of their own: called, cancelled, their errors carried home whole
hub       what the synchronizer's process keeps: the board, and where the weights of each version are
weights   the object store as a channel
engines   several replicas of a rollout engine as one engine
directory roles found by name
roles     what runs in the trainer's and in an explorer's process
crew      starts the roles of a stage, watches over them, replaces explorers that died
session   a Ray instance for one command
"""
