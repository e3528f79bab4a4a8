#!/usr/bin/env bash
# Builds sdist and wheel into FOLDER and checks what is in them. The wheel comes from the checkout, not from the sdist,
# so that what is already compiled is not compiled again; the sdist has to build too, for which the CPU library will do.
#     tools/check_wheel.sh FOLDER
set -euo pipefail
dist=$(realpath -m "${1:?usage: tools/check_wheel.sh FOLDER}")
root=$(realpath "$(dirname "$0")/..")

# Not from within the checkout, whose build/ would hide the module of that name.
cd /
python -m build --sdist --outdir "$dist" "$root"
python -m build --wheel --outdir "$dist" "$root"

tar -tzf "$dist"/flash_ext-*.tar.gz | sed 's,^[^/]*/,,' | sort >"$dist/sdist.txt"
(cd "$root" && find setup.py csrc build_support docs flash_ext tests tools \
  -name '*.h' -o -name '*.cpp' -o -name '*.cu*' -o -name '*.py' -o -name '*.sh' -o -name '*.md') | sort >"$dist/sources.txt"
missing=$(comm -13 "$dist/sdist.txt" "$dist/sources.txt")
[ -z "$missing" ] || { echo "the sdist lacks:" $missing; exit 1; }

mkdir -p "$dist/unpacked"
tar -xzf "$dist"/flash_ext-*.tar.gz -C "$dist/unpacked" --strip-components=1
FLASH_EXT_CUDA=0 python -m build --wheel --outdir "$dist/from_sdist" "$dist/unpacked"

wheel=$(ls "$dist"/*.whl)
python -m zipfile -l "$wheel" >"$dist/wheel.txt"
for name in __init__.py _build_info.json '_plan\..*\.so' 'lib/libflash_ext_cpu\.so'; do
  grep -q "^flash_ext/$name " "$dist/wheel.txt" || { echo "the wheel lacks flash_ext/$name"; exit 1; }
done

limit=$((60 * 1000 * 1000))
size=$(stat -c %s "$wheel")
echo "$(basename "$wheel"): $size bytes (allowed: $limit)"
[ "$size" -le "$limit" ]
