"""Every target by name."""

from tests.trials.fuzz import command_targets, data_targets, model_targets
from tests.trials.fuzz.target import Make

TARGETS: dict[str, Make] = {
    "texts": data_targets.texts,
    "table": data_targets.table,
    "stdin": data_targets.stdin,
    "idx": data_targets.idx,
    "archive": data_targets.archive,
    "picture": data_targets.picture,
    "latents": data_targets.latent,
    "vocabulary": model_targets.vocabulary,
    "hashing": model_targets.hashing,
    "schema": model_targets.schema,
    "pictures-json": model_targets.picture_format,
    "tensors": model_targets.tensors,
    "generator": model_targets.generator,
    "evaluator": model_targets.classifier,
    "run": model_targets.run,
    "checkpoint": model_targets.checkpoint,
    "tiles": model_targets.tiles,
    "bench": model_targets.bench,
    "images-json": model_targets.images,
    "command": command_targets.command,
}
