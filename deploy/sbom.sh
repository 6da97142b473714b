#!/bin/sh
# What is in the image that this runs in, as SPDX 2.3 in JSON: Debian's packages as dpkg knows them, and what FILES name.
#   sbom.sh VERSION FILE… > sbom.spdx.json
# A line of a file: "compiled-in PACKAGE VERSION ARCHITECTURE" (of Debian) or "source NAME VERSION URL SHA256" ("-": unknown).
set -eu
version=$1; shift
list=$(dpkg-query -W -f 'package ${Package} ${Version} ${Architecture}\n' | cat - "$@")
digest=$(printf '%s' "$list" | sha256sum | cut -c 1-32)
printf '%s\n' "$list" | LC_ALL=C awk -v version="$version" -v digest="$digest" -v now="$(date -u +%Y-%m-%dT%H:%M:%SZ)" '
function encoded(text) { gsub(/%/, "%25", text); gsub(/\+/, "%2B", text); gsub(/:/, "%3A", text); return text }
function written(id, name, version, url, more) {
  packages = packages ",\n  {\"SPDXID\": \"" id "\", \"name\": \"" name "\", \"versionInfo\": \"" version "\", \"downloadLocation\": \"" url \
    "\", \"filesAnalyzed\": false, \"licenseConcluded\": \"NOASSERTION\", \"licenseDeclared\": \"NOASSERTION\", \"copyrightText\": \"NOASSERTION\"" more "}"
}
function related(from, how, to) {
  relations = relations ",\n  {\"spdxElementId\": \"" from "\", \"relationshipType\": \"" how "\", \"relatedSpdxElement\": \"" to "\"}"
}
function id_of(kind, name, version) { name = "SPDXRef-" kind "-" name "-" version; gsub(/[^A-Za-z0-9.-]/, "-", name); return name }
function purl(name, version, architecture) {
  return ", \"externalRefs\": [{\"referenceCategory\": \"PACKAGE-MANAGER\", \"referenceType\": \"purl\", \"referenceLocator\": \"pkg:deb/debian/" \
    encoded(name) "@" encoded(version) "?arch=" architecture "\"}]"
}
$1 == "package" || $1 == "compiled-in" {
  id = id_of($1, $2 "-" $4, $3)
  written(id, $2, $3, "NOASSERTION", purl($2, $3, $4))
  if ($1 == "package") related("SPDXRef-image", "CONTAINS", id); else related("SPDXRef-weightwire", "STATIC_LINK", id)
}
$1 == "source" {
  id = id_of($1, $2, $3)
  written(id, $2, $3, $4, $5 == "-" ? "" : ", \"checksums\": [{\"algorithm\": \"SHA256\", \"checksumValue\": \"" $5 "\"}]")
  related("SPDXRef-image", "CONTAINS", id)
}
END {
  print "{\"spdxVersion\": \"SPDX-2.3\", \"dataLicense\": \"CC0-1.0\", \"SPDXID\": \"SPDXRef-DOCUMENT\", \"name\": \"weightwire-" version "\","
  print " \"documentNamespace\": \"https://spdx.org/spdxdocs/weightwire-" version "-" digest "\","
  print " \"creationInfo\": {\"created\": \"" now "\", \"creators\": [\"Tool: weightwire-sbom.sh\"]},"
  print " \"packages\": ["
  print "  {\"SPDXID\": \"SPDXRef-image\", \"name\": \"weightwire-image\", \"versionInfo\": \"" version "\", \"downloadLocation\": \"NOASSERTION\", \"filesAnalyzed\": false, \"primaryPackagePurpose\": \"CONTAINER\"},"
  printf "%s", "  {\"SPDXID\": \"SPDXRef-weightwire\", \"name\": \"weightwire\", \"versionInfo\": \"" version "\", \"downloadLocation\": \"NOASSERTION\", \"filesAnalyzed\": false, \"licenseDeclared\": \"Apache-2.0\"}"
  print packages "\n ],"
  print " \"relationships\": ["
  print "  {\"spdxElementId\": \"SPDXRef-DOCUMENT\", \"relationshipType\": \"DESCRIBES\", \"relatedSpdxElement\": \"SPDXRef-image\"},"
  printf "%s", "  {\"spdxElementId\": \"SPDXRef-image\", \"relationshipType\": \"CONTAINS\", \"relatedSpdxElement\": \"SPDXRef-weightwire\"}"
  print relations "\n ]}"
}'
