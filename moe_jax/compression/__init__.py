"""A trained MoE made smaller: DeRS compression, ResMoE, and their pieces (methods.md 4, 5).

`moe_jax.compress` is the verb. Here are the methods by name, the reports, `sweep`, and the barycenter that ResMoE
aligns experts by.

    >>> from moe_jax.compression import METHODS, make_method
    >>> "resmoe" in METHODS, make_method("quantize", {"bits": 4}).bits
    (True, 4)

Names are imported when they are first asked for.

Methods:
    METHODS, make_method             all by name, and one with its options
    option_names                     the options of all methods
    Method, MethodOptions            what all have in common
    SourceLayer, Base                what they are given: the experts of a layer, and their base
    Fewer                            experts that stay whole and are fewer or smaller
    free_support_barycenter, Barycenter
                                     the barycenter of point clouds, by which experts are aligned

Jobs:
    compress                         a model on the disk, one layer at a time
    Report, LayerReport, LayerFigures, Recovery
                                     figures of a model, of a layer, and of its matrices
    Rest, MapAnalysis                the model outside its experts, as methods see it
    Plan, TriedPlan                  the next form of a model, and a plan that was tried
    LinearMap, MapErrors, PartReport
                                     a linear map outside the experts, figures of some, and of those of a part
    Losses                           of the calibration text, before and after
    Calibration, LayerCalibration, LayerRows
                                     a recording of a model on a text, of a layer, and the inputs of its experts
    CalibrationRows, ScoredRow       the rows of tokens that the model is run on, and a document as one
    sweep, make_swept_methods        many methods tried, and what is tried
    Sweep, Point, Score              the result, one model of it, and what scores it
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from moe_jax.compression.alignment.barycenter import Barycenter as Barycenter
    from moe_jax.compression.alignment.barycenter import free_support_barycenter as free_support_barycenter
    from moe_jax.compression.calibration.calibration_rows import CalibrationRows as CalibrationRows
    from moe_jax.compression.calibration.calibration_rows import ScoredRow as ScoredRow
    from moe_jax.compression.calibration.map_analysis import MapAnalysis as MapAnalysis
    from moe_jax.compression.calibration.recording import Calibration as Calibration
    from moe_jax.compression.calibration.recording import LayerCalibration as LayerCalibration
    from moe_jax.compression.calibration.recording import LayerRows as LayerRows
    from moe_jax.compression.coding.storage import Fewer as Fewer
    from moe_jax.compression.linear_maps import LinearMap as LinearMap
    from moe_jax.compression.method_sweep import Score as Score
    from moe_jax.compression.method_sweep import sweep as sweep
    from moe_jax.compression.methods.interface import Base as Base
    from moe_jax.compression.methods.interface import Method as Method
    from moe_jax.compression.methods.interface import Plan as Plan
    from moe_jax.compression.methods.interface import Rest as Rest
    from moe_jax.compression.options.in_common import MethodOptions as MethodOptions
    from moe_jax.compression.part_report import Losses as Losses
    from moe_jax.compression.part_report import MapErrors as MapErrors
    from moe_jax.compression.part_report import PartReport as PartReport
    from moe_jax.compression.part_report import TriedPlan as TriedPlan
    from moe_jax.compression.recovery_figures import Recovery as Recovery
    from moe_jax.compression.report import LayerFigures as LayerFigures
    from moe_jax.compression.report import LayerReport as LayerReport
    from moe_jax.compression.report import Point as Point
    from moe_jax.compression.report import Report as Report
    from moe_jax.compression.report import Sweep as Sweep
    from moe_jax.compression.source_layer import SourceLayer as SourceLayer
    from moe_jax.compression.spec import METHODS as METHODS
    from moe_jax.compression.spec import make_method as make_method
    from moe_jax.compression.spec import make_swept_methods as make_swept_methods
    from moe_jax.compression.spec import option_names as option_names
    from moe_jax.compression.stream import compress as compress
