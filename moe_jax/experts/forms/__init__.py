"""Forms of experts, each found by its name, and the types that their methods meet.

A form of your own is a frozen dataclass derived from `KernelForm`, with a name from `register`.

Forms:
    Full, LowRank, JointLowRank, Sparse, Quantized, MixtureOfBases
    Coded                            a whole kernel in codes of another form
    ExpertForm, KernelForm           what all have in common, and those that have kernels
    register                         gives a form its name

Arguments of their methods:
    Matrix, ffn_matrices             a matrix of an FFN, and all of them by name
    Part, Window                     the part of a kernel on one device, and columns of it
    Arrays                           the arrays of a matrix, by path
    Load, Platform, Chip, Cost       what the choice of a way to compute depends on

For forms that experts are compressed to:
    Encodable, Storable              one matrix at a time; forms whose size follows from a share or a number of bits
    Residual                         what is encoded
    Coder, JointCoder                the methods to do it with
    Encoded, MoreOfCodes             a kernel in codes, and further options of codes
    WholeNumberCodes                 codes of whole numbers in groups, as other libraries store them, too
    Wanted, Layout                   how much of the experts is to stay, and ways to store them that have a name
    Own                              the place of one expert among the arrays
"""

from moe_jax.core.data_sheets import Chip as Chip
from moe_jax.experts.devices import Cost as Cost
from moe_jax.experts.devices import Platform as Platform
from moe_jax.experts.forms.coding import Coder as Coder
from moe_jax.experts.forms.coding import Encodable as Encodable
from moe_jax.experts.forms.coding import Encoded as Encoded
from moe_jax.experts.forms.coding import JointCoder as JointCoder
from moe_jax.experts.forms.coding import Layout as Layout
from moe_jax.experts.forms.coding import MoreOfCodes as MoreOfCodes
from moe_jax.experts.forms.coding import Own as Own
from moe_jax.experts.forms.coding import Residual as Residual
from moe_jax.experts.forms.coding import Storable as Storable
from moe_jax.experts.forms.coding import Wanted as Wanted
from moe_jax.experts.forms.coding import WholeNumberCodes as WholeNumberCodes
from moe_jax.experts.forms.kernel_of_codes import Coded as Coded
from moe_jax.experts.forms.low_rank import JointLowRank as JointLowRank
from moe_jax.experts.forms.low_rank import LowRank as LowRank
from moe_jax.experts.forms.mixture_of_bases import MixtureOfBases as MixtureOfBases
from moe_jax.experts.forms.protocol import ExpertForm as ExpertForm
from moe_jax.experts.forms.protocol import KernelForm as KernelForm
from moe_jax.experts.forms.protocol import register as register
from moe_jax.experts.forms.quantized import Quantized as Quantized
from moe_jax.experts.forms.sparse import Sparse as Sparse
from moe_jax.experts.forms.whole import Full as Full
from moe_jax.experts.shapes import Arrays as Arrays
from moe_jax.experts.shapes import Load as Load
from moe_jax.experts.shapes import Matrix as Matrix
from moe_jax.experts.shapes import Part as Part
from moe_jax.experts.shapes import Window as Window
from moe_jax.experts.shapes import ffn_matrices as ffn_matrices
