#!/bin/sh
# The image's entry: `demo`, `vllm …` and `wwctl …` are commands of their own, everything else are weightwired's options.
case ${1:-} in
  demo | vllm) exec python3 -m weightwire "$@" ;;
  wwctl | weightwired | python3) exec "$@" ;;
  *) exec weightwired "$@" ;;
esac
