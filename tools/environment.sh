#!/bin/sh
# Make the virtual environment and install penstock in it.
#
#   tools/environment.sh FOLDER [EXTRA [PACKAGE]]
#
# FOLDER is where the environment goes, EXTRA a further extra such as dev, PACKAGE the folder of
# another package of this checkout that is installed, too.
# PYTHON names the interpreter, BACKEND (cpu, cuda or none) the MLX back end; both are
# found if they are not given.
set -eu

folder=$1
extra=${2:-}
package=${3:-}

suits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
        >/dev/null 2>&1
}

find_python() {
    for name in ${PYTHON:-python3.13 python3.14 python3.12 python3.11 python3 python}; do
        if suits "$name"; then
            echo "$name"
            return
        fi
    done
    echo "penstock needs Python 3.11 to 3.14 with venv, and found none." >&2
    echo "Install one (Debian and Ubuntu: python3 and python3-venv) or name it: make PYTHON=..." >&2
    exit 1
}

# CUDA 13 is what mlx[cuda13] is built for; an older driver cannot run it.
has_cuda() {
    command -v nvidia-smi >/dev/null 2>&1 || return 1
    version=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
    if [ "${version:-0}" -lt 13 ]; then
        echo "The NVIDIA driver is too old for CUDA 13 (it has ${version:-none}); using the CPU." >&2
        return 1
    fi
}

find_backend() {
    if [ "$(uname -s)" = Darwin ]; then
        echo none
    elif has_cuda; then
        echo cuda
    else
        echo cpu
    fi
}

# What MLX's wheels for Linux are built for; without them pip names no reason.
has_libc() {
    "$1" -c 'import platform, sys
library, version = platform.libc_ver()
found = library == "glibc" and [int(part) for part in version.split(".")] >= [2, 35]
sys.exit(sys.platform == "linux" and not found)'
}

if [ ! -x "$folder/bin/python" ]; then
    python=$(find_python)
    if ! has_libc "$python"; then
        echo "MLX's wheels for Linux need glibc 2.35 or later; Alpine (musl) and older systems have none." >&2
        exit 1
    fi
    "$python" -m venv "$folder"
fi
backend=${BACKEND:-$(find_backend)}
extras=$(echo "$backend $extra" | sed 's/none//; s/^ *//; s/ *$//; s/  */,/')
# Python compiles what it imports; to compile all would take as long as all else here.
echo "installing penstock${extras:+[$extras]}${package:+ and $package} in $folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --editable ".${extras:+[$extras]}" ${package:+--editable "./$package"}
