"""ft-run: torchrun's arguments, an elastic agent bounded by progress, and a watcher that keeps the SMP alive."""

import warnings

from ..base import stamps as stamps  # first: a rank begins here

# torch imports pynvml where another package has brought it, which warns on every start, to users who cannot act on it
warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)
