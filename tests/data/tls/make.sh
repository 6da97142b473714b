#!/bin/sh
# Makes ca.pem, agent.pem and agent.key, which the conformance suite runs tcp under TLS with. They protect nothing.
set -eu
cd "$(dirname "$0")"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.pem -days 36500 -subj "/CN=weightwire tests" 2>/dev/null
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout agent.key -out agent.csr -subj "/CN=agent" 2>/dev/null
printf 'subjectAltName=URI:spiffe://test/ns/test/job/test/role/agent\nextendedKeyUsage=clientAuth,serverAuth\n' >agent.ext
openssl x509 -req -in agent.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 36500 -extfile agent.ext -out agent.pem 2>/dev/null
rm -f ca.key ca.srl agent.csr agent.ext
