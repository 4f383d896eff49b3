"""Four verbs (`run.mode: tinker`): scripts written for the Tinker SDK train and sample on this machine."""
