#!/bin/sh
# The image's entry: `demo` and `wwctl …` are commands of their own, everything else are weightwired's options.
case ${1:-} in
  demo) exec python3 -m weightwire "$@" ;;
  wwctl | weightwired | python3) exec "$@" ;;
  *) exec weightwired "$@" ;;
esac
