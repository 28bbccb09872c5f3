"""Trained MoE -> smaller MoE: DeRS compression, ResMoE and its baselines (METHODS 4 and 5)."""

from moe_jax.compress.calibration import Calibration as Calibration
from moe_jax.compress.calibration import RouterStatistics as RouterStatistics
from moe_jax.compress.job import compress as compress
from moe_jax.compress.method import Method as Method
from moe_jax.compress.methods import METHODS as METHODS
from moe_jax.compress.methods import make_method as make_method
from moe_jax.compress.methods import make_swept_methods as make_swept_methods
from moe_jax.compress.methods import option_names as option_names
from moe_jax.compress.report import LayerReport as LayerReport
from moe_jax.compress.report import Report as Report
from moe_jax.compress.sweeping import Score as Score
from moe_jax.compress.sweeping import Sweep as Sweep
from moe_jax.compress.sweeping import sweep as sweep
