"""Trinity-RFT's Trainer, engines and workflows, over the core's."""
