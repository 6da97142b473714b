#!/usr/bin/env bash
# A CA of one's own and certificates with weightwire's identities, for tests and small installations; cert-manager or
# SPIRE make the same where there is a cluster (docs/security.md).
#
#   deploy/certs.sh DIR ca                       DIR/ca.crt, DIR/ca.key
#   deploy/certs.sh DIR issue NAME ROLE [OPTION…]  DIR/NAME/{tls.crt,tls.key,ca.crt}; again: replaces all three at once
#     --job JOB (default)  --ns NS (default)  --domain DOMAIN (weightwire.test)  --rank N  --days N (30; below 0: expired)
#     --san NAMES          what the process is dialled as: DNS:host,IP:10.0.0.1; a coordinator needs it
set -euo pipefail
umask 077

die() { echo "certs.sh: $*" >&2; exit 64; }
[ $# -ge 2 ] || die "usage: certs.sh DIR ca | certs.sh DIR issue NAME ROLE [--job J] [--ns N] [--domain D] [--rank N] [--days N] [--san NAMES]"
dir=$1 command=$2
shift 2
mkdir -p "$dir"

new_key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"; }

make_ca() {
  [ ! -e "$dir/ca.crt" ] || die "$dir/ca.crt is there already"
  new_key "$dir/ca.key"
  openssl req -x509 -new -key "$dir/ca.key" -sha256 -days 3650 -subj "/CN=weightwire CA" -out "$dir/ca.crt" \
    -addext basicConstraints=critical,CA:TRUE,pathlen:0 -addext keyUsage=critical,keyCertSign,cRLSign
}

issue() {
  [ $# -ge 2 ] || die "issue needs NAME and ROLE"
  local name=$1 role=$2 job=default ns=default domain=weightwire.test rank='' days=30 san=''
  shift 2
  while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || die "$1 needs a value"
    case $1 in
      --job) job=$2 ;;
      --ns) ns=$2 ;;
      --domain) domain=$2 ;;
      --rank) rank=$2 ;;
      --days) days=$2 ;;
      --san) san=$2 ;;
      *) die "unknown option $1" ;;
    esac
    shift 2
  done
  [[ $role =~ ^(coordinator|trainer|engine|agent|operator|metrics)$ ]] || die "no role $role: coordinator, trainer, engine, agent, operator and metrics are"
  local uri="spiffe://$domain/ns/$ns/job/$job/role/$role${rank:+/rank/$rank}" fresh
  # A folder of its own behind a link, so that key and certificate change in one step.
  fresh=$(mktemp -d "$dir/.$name.XXXXXX")
  new_key "$fresh/tls.key"
  openssl req -new -key "$fresh/tls.key" -subj "/CN=$role" -out "$fresh/request"
  printf '%s\n' "subjectAltName=URI:$uri${san:+,$san}" basicConstraints=critical,CA:FALSE \
    keyUsage=critical,digitalSignature extendedKeyUsage=clientAuth,serverAuth >"$fresh/extensions"
  local term=(-days "$days") said
  # OpenSSL 3.5 refuses days below 0; it takes dates, which 3.0 does not know.
  if [[ $days == -* && $(openssl x509 -help 2>&1) == *-not_after* ]]; then
    term=(-not_before "$(date -u -d "$((days - 1)) days" +%Y%m%d%H%M%SZ)" -not_after "$(date -u -d "$days days" +%Y%m%d%H%M%SZ)")
  fi
  said=$(openssl x509 -req -in "$fresh/request" -CA "$dir/ca.crt" -CAkey "$dir/ca.key" -set_serial "0x$(openssl rand -hex 16)" \
    -sha256 "${term[@]}" -extfile "$fresh/extensions" -out "$fresh/tls.crt" 2>&1) || die "$said"
  cp "$dir/ca.crt" "$fresh/ca.crt"
  rm "$fresh/request" "$fresh/extensions"
  local before=''
  [ ! -L "$dir/$name" ] || before=$(readlink "$dir/$name")
  ln -s "$(basename "$fresh")" "$fresh.link"
  mv -T "$fresh.link" "$dir/$name"
  [ -z "$before" ] || rm -r "${dir:?}/$before"
}

case $command in
  ca) make_ca ;;
  issue) issue "$@" ;;
  *) die "unknown command $command: ca and issue are" ;;
esac
