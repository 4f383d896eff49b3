"""Trinity-RFT's Synchronizer and CheckpointMonitor, which Ray actors share between the processes of a run."""
