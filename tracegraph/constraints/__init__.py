"""The capture constraints: what a CUDA graph cannot hold, found before a device is touched."""

from tracegraph.constraints.arguments import ArgumentLeaf as ArgumentLeaf
from tracegraph.constraints.arguments import check_arguments as check_arguments
from tracegraph.constraints.check import check_graph as check_graph
from tracegraph.constraints.check import find_uncapturable as find_uncapturable
from tracegraph.constraints.constants import find_large_constants as find_large_constants
from tracegraph.constraints.frames import locate_caller as locate_caller
from tracegraph.constraints.frames import locate_function as locate_function
from tracegraph.constraints.leaks import check_leaks as check_leaks
from tracegraph.constraints.mismatch import describe_mismatch as describe_mismatch
from tracegraph.constraints.printing import watch_print as watch_print
from tracegraph.constraints.trace_errors import translate_trace_error as translate_trace_error
from tracegraph.constraints.traces import compare_traces as compare_traces
from tracegraph.constraints.violation import Violation as Violation
from tracegraph.constraints.violation import make_capture_error as make_capture_error
