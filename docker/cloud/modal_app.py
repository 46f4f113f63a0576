"""Modal's part of docker/cloud/rent.py: the image, a function with a GPU, and the volume that keeps the
results.

`rent.py` starts it as `modal run`, with the GPU, the time limit and the volume as options: those of the
decorator below are defaults that it always replaces. Credentials are those of `modal setup`, or
MODAL_TOKEN_ID and MODAL_TOKEN_SECRET; none is read here.

Modal may take a machine away. It then interrupts the function and starts it again with the same arguments:
the second one goes on from the volume, and its time counts together with that of the first.
"""

import os
import sys
from pathlib import Path, PurePosixPath

import modal

ROOT = Path(__file__).resolve().parents[2] if modal.is_local() else Path("/opt/ablate")
sys.path.insert(0, str(ROOT / "docker" / "cloud"))
import session  # noqa: E402 - a file of that folder

KEPT = "/mirror"
UPLOADS = PurePosixPath("/") / "work"
"""Folder of the volume for the experiments of each request."""
CPUS, MEMORY = 8.0, 65536
"""Processor cores and MiB that are asked for: Modal charges both besides the GPU."""

image = (
    modal.Image.from_dockerfile(
        ROOT / "docker" / "blackwell.Dockerfile", context_dir=ROOT, build_args={"TESTS": "yes"}
    )
    .dockerfile_commands("USER root")  # volumes are root's
    .entrypoint([])  # Modal starts a program of its own
    .add_local_dir(ROOT / "tests", "/opt/ablate/tests", ignore=["**/__pycache__"])
    .add_local_dir(ROOT / "benchmarks", "/opt/ablate/benchmarks", ignore=["**/__pycache__"])
)
app = modal.App("ablate-rented")


@app.function(
    image=image,
    gpu="B200",
    timeout=3600,
    startup_timeout=1800,
    cpu=CPUS,
    memory=MEMORY,
    volumes={KEPT: modal.Volume.from_name("ablate-b200", create_if_missing=True)},
    env=session.ENVIRONMENT,
    max_containers=1,
    single_use_containers=True,
)
def rented(wire: str, store: str) -> int:
    """Run a request on this machine and return its exit status.

    Args:
        wire: the request.
        store: name of the volume that is mounted.

    Raises:
        KeyboardInterrupt: Modal takes the machine away; everything is kept, and Modal starts the function
        again.
    """
    request, kept = session.Request.parse(wire), Path(KEPT)
    session.take_work(kept / UPLOADS.name, request.run, Path(session.WORK))
    os.chdir(session.WORK)
    volume = modal.Volume.from_name(store)
    status = session.Session(request, Path(session.HOME), kept, after=volume.commit).run()
    if status == session.TERMINATED:
        raise KeyboardInterrupt
    return status


@app.local_entrypoint()
def main(given: str, store: str, limit: int, gpu: str) -> None:
    """Upload the experiments, run the request on a machine with these properties, and exit with its status.

    Args:
        given: folder with request.json and work/, made by rent.py.
        store: name of the volume.
        limit: seconds after which Modal ends the function.
        gpu: Modal's name of the GPU.
    """
    wire = (Path(given) / "request.json").read_text()
    request = session.Request.parse(wire)
    volume, uploaded = modal.Volume.from_name(store, create_if_missing=True), UPLOADS / request.run
    with volume.batch_upload(force=True) as batch:
        batch.put_file(Path(given) / "request.json", str(uploaded / ".request.json"))
        batch.put_directory(Path(given) / "work", str(uploaded))
    call = rented.with_options(gpu=gpu, timeout=limit, volumes={KEPT: volume})
    sys.exit(call.remote(wire, store))
