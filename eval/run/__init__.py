"""One evaluation: from the configuration to a job, its replay, and the rows it appends."""

from leank.extras import require

require("leank.eval", "eval", "hydra")
