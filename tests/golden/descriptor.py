#!/usr/bin/env python3
"""Compares proto/weightwire/v1 with the contract on record, tests/golden/contract.txt.

The record has one line per message field, enum value and rpc. Without options: exit 1 and a diff when a
line changed, vanished or is not on record yet. With --update: new lines are added to the record; exit 1,
and nothing is written, when a line on record would change or vanish, because peers of other versions
rely on it.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

from google.protobuf import descriptor_pb2

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = pathlib.Path(__file__).with_name("contract.txt")
PACKAGE = "weightwire.v1"
Field = descriptor_pb2.FieldDescriptorProto


def compiled():
    """The FileDescriptorSet of proto/weightwire/v1 as bytes."""
    protos = sorted(str(path) for path in (ROOT / "proto/weightwire/v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "set.pb"
        subprocess.run(["protoc", "-I", str(ROOT / "proto"), f"--descriptor_set_out={out}", *protos], check=True)
        return out.read_bytes()


def type_of(field):
    if field.type in (Field.TYPE_MESSAGE, Field.TYPE_ENUM):
        kind = "message" if field.type == Field.TYPE_MESSAGE else "enum"
        return f"{kind} {field.type_name.lstrip('.')}"
    return Field.Type.Name(field.type).removeprefix("TYPE_").lower()


def field_line(scope, message, field):
    name = f"{scope}.{field.name} = {field.number}"
    for entry in message.nested_type:
        if entry.options.map_entry and field.type_name.endswith(f".{message.name}.{entry.name}"):
            return f"{name} map<{type_of(entry.field[0])}, {type_of(entry.field[1])}>"
    label = "repeated" if field.label == Field.LABEL_REPEATED else "singular"
    if field.proto3_optional:
        label = "optional"
    elif field.HasField("oneof_index"):
        label = f"oneof {message.oneof_decl[field.oneof_index].name}"
    return f"{name} {type_of(field)} {label}"


def message_lines(scope, message):
    scope = f"{scope}.{message.name}"
    for field in message.field:
        yield field_line(scope, message, field)
    for enum in message.enum_type:
        yield from enum_lines(scope, enum)
    for nested in message.nested_type:
        if not nested.options.map_entry:
            yield from message_lines(scope, nested)


def enum_lines(scope, enum):
    for value in enum.value:
        yield f"{scope}.{enum.name}.{value.name} = {value.number} value"


def method_line(scope, service, method):
    up = "stream " if method.client_streaming else ""
    down = "stream " if method.server_streaming else ""
    return (f"{scope}.{service.name}.{method.name} = rpc ({up}{method.input_type.lstrip('.')}) "
            f"returns ({down}{method.output_type.lstrip('.')})")


def listing(descriptor_set):
    """The contract's lines, sorted."""
    lines = []
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptor_set).file:
        if file.package != PACKAGE:
            continue
        for message in file.message_type:
            lines.extend(message_lines(file.package, message))
        for enum in file.enum_type:
            lines.extend(enum_lines(file.package, enum))
        for service in file.service:
            lines.extend(method_line(file.package, service, method) for method in service.method)
    return sorted(lines)


def compare(recorded, now):
    """(broken, fresh): what breaks peers, and what is only not on record yet, as text."""
    old = dict(line.split(" = ", 1) for line in recorded)
    new = dict(line.split(" = ", 1) for line in now)
    broken = []
    for name, meaning in old.items():
        if name not in new:
            broken.append(f"vanished  - {name} = {meaning}")
        elif new[name] != meaning:
            broken.append(f"changed   - {name} = {meaning}\n          + {name} = {new[name]}")
    return broken, [f"new       + {name} = {meaning}" for name, meaning in new.items() if name not in old]


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="add what is new to the record")
    parser.add_argument("--descriptor-set", type=pathlib.Path, help="instead of compiling the protos")
    parser.add_argument("--record", type=pathlib.Path, default=RECORD)
    options = parser.parse_args(arguments)
    now = listing(options.descriptor_set.read_bytes() if options.descriptor_set else compiled())
    recorded = options.record.read_text().splitlines() if options.record.exists() else []
    broken, fresh = compare(recorded, now)
    print("\n".join(broken + fresh) or f"{len(now)} lines as on record")
    if broken:
        print("Peers of other versions rely on these lines: add a field, value or rpc instead.")
        return 1
    if options.update:
        options.record.write_text("\n".join(now) + "\n")
        return 0
    if fresh:
        print("Put them on record: tests/golden/descriptor.py --update")
    return 1 if fresh else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
