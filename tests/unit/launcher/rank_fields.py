"""What a rank finds of its process, for a comparison of forked ranks with new processes, field by field."""

SCRIPT = """
import asyncio, atexit, ctypes, decimal, faulthandler, gc, json, locale, logging, multiprocessing, os, random, resource
import signal, socket, sys, tempfile, threading, time, tracemalloc, warnings
from pathlib import Path
import package, torch
import numpy as np
from ft_plugins.model import imported

def status():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = ("Umask", "Threads", "SigBlk", "SigIgn", "SigCgt", "Cpus_allowed", "NoNewPrivs", "Seccomp", "Uid", "Gid",
             "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    return {name: lines.get(name) for name in names}

def descriptors():
    found = {}
    for each in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{each}"):
            found[each] = os.readlink(f"/proc/self/fd/{each}"), os.get_inheritable(int(each))
    return {number: link for number, link in found.items() if not link[0].startswith("/proc/")}

def stream(each):
    return (each.name, each.mode, each.encoding, each.errors, each.line_buffering, each.write_through, each.newlines,
            each.seekable(), each.isatty(), each.fileno(), type(each.buffer).__name__)

def set_by_imports():
    return {"environment": dict(os.environ), "filters": [str(each) for each in warnings.filters],
            "exits": atexit._ncallbacks(), "handlers": {str(number): str(signal.getsignal(number))
            for number in signal.valid_signals()}}

death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)
own = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
now = time.time()  # before its age
since = time.clock_gettime(time.CLOCK_BOOTTIME) - int(own[19]) / os.sysconf("SC_CLK_TCK")
main, root = threading.main_thread(), logging.getLogger()
same = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "flags": str(sys.flags), "path": sys.path, "cwd": os.getcwd(),
    "name": (__name__, __file__, __package__), "main": sys.modules["__main__"].__dict__ is globals(),
    "command": Path("/proc/self/cmdline").read_bytes().decode(errors="replace"),
    "comm": Path("/proc/self/comm").read_text(), "executable": sys.executable, "prefix": (sys.prefix, sys.base_prefix),
    "status": status(), "descriptors": descriptors(), "streams": [stream(sys.stdout), stream(sys.stderr)],
    "original": [each.fileno() for each in (sys.__stdin__, sys.__stdout__, sys.__stderr__)],
    "input": (os.readlink("/proc/self/fd/0"), sys.stdin.name, sys.stdin.encoding, sys.stdin.isatty()),
    "death": death.value, "dumpable": ctypes.CDLL(None).prctl(3, 0, 0, 0, 0),
    "leads": os.getpid() == os.getsid(0) == os.getpgid(0), "parent": os.getppid(), "nice": os.nice(0),
    "scheduler": (os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))),
    "oom_score_adj": Path("/proc/self/oom_score_adj").read_text(), "cgroup": Path("/proc/self/cgroup").read_text(),
    "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt", "pid", "ipc", "user")},
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name},
    "timers": [signal.getitimer(each) for each in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)],
    "wakeup": signal.set_wakeup_fd(-1), "faulthandler": faulthandler.is_enabled(),
    "thread": threading.current_thread() is main, "native_id": main.native_id == os.getpid(),
    "ident": main.ident == threading.get_ident(), "threads": [each.name for each in threading.enumerate()],
    "stack_size": threading.stack_size(), "traced": (sys.gettrace(), sys.getprofile(), tracemalloc.is_tracing()),
    "hooks": [str(each) for each in (sys.excepthook, sys.displayhook, sys.unraisablehook, sys.breakpointhook)],
    "thread_hook": threading.excepthook is threading.__excepthook__, "audited": sys.dont_write_bytecode,
    "path_hooks": [str(each).partition(" at ")[0] for each in sys.path_hooks],
    "finders": [str(each).partition(" object at ")[0] for each in sys.meta_path],
    "collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)),
    "recursion": sys.getrecursionlimit(), "switch": sys.getswitchinterval(),
    "options": (sys.warnoptions, sys._xoptions), "locale": locale.setlocale(locale.LC_ALL),
    "encodings": (sys.getfilesystemencoding(), locale.getpreferredencoding()),
    "time_zone": (time.tzname, time.timezone), "decimals": str(decimal.getcontext()), "tempdir": tempfile.tempdir,
    "logging": (root.level, [str(each) for each in root.handlers], logging.root.manager.disable),
    "loop": type(asyncio.get_event_loop_policy()).__name__, "socket_timeout": socket.getdefaulttimeout(),
    "start_method": multiprocessing.get_start_method(allow_none=True),
    "parent_process": (multiprocessing.parent_process(), multiprocessing.current_process().name),
    "children": [str(each) for each in multiprocessing.active_children()],
    "numpy": (np.geterr(), str(np.get_printoptions())),
    "torch": (torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype())),
    "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled()),
    "exactness": (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()),
    "distributed": (torch.distributed.is_initialized(), torch.multiprocessing.get_sharing_strategy()),
    "cuda": (torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()),
    "hash": (sys.hash_info.algorithm, sys.flags.hash_randomization),
    **set_by_imports(), "in_c": {name: ctypes.CDLL(None).getenv(name.encode()) != 0 for name in
    ("RANK", "FTP_TOKEN", "PYTORCH_NVML_BASED_CUDA_CHECK", "SET_BY_PACKAGE", "SET_BY_SELDOM")},
    "package": (package.__file__, package.PID == os.getpid(), package.FOUND),
    "young": [now - logging._startTime < since + 11, now - package.NOTED < since + 1],
}
others = {"random": random.random(), "numpy": float(np.random.random()),
          "torch": torch.initial_seed(), "key": bytes(multiprocessing.current_process().authkey).hex(),
          "modules": len(sys.modules)}

def record():
    import seldom
    imported.write(Path(os.environ["FTP_RUN_DIR"]), int(os.environ["LOCAL_RANK"]), int(os.environ["FTP_TOKEN"]))

record()
in_c = ctypes.CDLL(None).getenv(b"SET_BY_SELDOM") != 0
same["later"] = {**set_by_imports(), "outdated": imported.outdated(), "in_c": in_c}
same["later"]["environment"].pop("FTP_TOKEN")
print("to standard error", file=sys.stderr)
print(json.dumps([same, others]))
if "--fail" in sys.argv:
    raise ValueError("a script's own error")
if "--wait" in sys.argv:
    signal.pause()
"""
PACKAGE = """
import os, sys, time
import numpy.random
NOTED, PID = time.time(), os.getpid()
FOUND = os.environ.get("KNOWN")
os.environ["SET_BY_PACKAGE"] = "once"
print("the package is imported")
"""
SELDOM = """
import atexit, os, pathlib, warnings
os.environ["SET_BY_SELDOM"] = "x"
warnings.filterwarnings("once", "seldom", UserWarning)

@atexit.register
def note():
    with open(pathlib.Path(os.environ["FTP_RUN_DIR"], "exits"), "a") as file:
        file.write("x")
"""
