"""Training: batches are cut and packed, a learner per role scores and updates, an engine holds the learners."""
