"""Trinity-RFT's Synchronizer and CheckpointMonitor: actors with a board that the processes of a run share."""
