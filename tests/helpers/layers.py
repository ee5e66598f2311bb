"""The floors of the packages, which the imports keep to and the page on the architecture shows."""

# the rooms (folders and files) of a package from the top floor down: each imports from its own floor's rooms below
LAYERS = {
    "leank.data_gen": [
        {"__main__"}, {"tasks"}, {"task"}, {"request"}, {"haystack", "sample", "gsm"},
        {"tokens", "reading", "chat", "amount"},
    ],
    "leank": [
        {"wandb_log"}, {"backbone"}, {"channel_scores", "head"}, {"mask", "rotary", "shipped"}, {"smollm2"},
        {"shape", "tensor_files", "typed", "model_folder", "stats", "kernels"},
        {"hub"}, {"files", "cli", "registry"}, {"errors"},
    ],
    "leank_train": [
        {"__main__"}, {"train", "doctor", "share"}, {"calibration"}, {"fitting", "validation", "verdict"}, {"run_folder"}, {"settings"},
        {"stages"}, {"running"}, {"data"}, {"objective"}, {"forward"},
    ],
    "leank.eval": [
        {"__main__"}, {"lm_eval"}, {"papers"}, {"run"}, {"report"}, {"rows"}, {"methods"}, {"inference"},
        {"benchmarks"}, {"metrics", "published"}, {"serving"}, {"cache"},
    ],
    "leank.eval.cache": [
        {"cache"}, {"generate", "memory", "saved"}, {"graph"}, {"hook"}, {"layer"}, {"attention"},
        {"storage"},
    ],
    "leank.eval.methods": [
        {"match"}, {"memory"}, {"base"}, {"tokens", "bits", "reads", "prefill"}, {"channels"}, {"common", "kernels"},
        {"registry"}, {"axes"}, {"held"},
    ],
}  # fmt: skip
