#!/usr/bin/env python3
"""The contract check must find what it is for: each kind of break is refused by both modes, and what is
new is refused by the comparison but taken on record by --update."""

import contextlib
import io
import pathlib
import sys
import tempfile

import descriptor
from google.protobuf import descriptor_pb2

SOURCE = descriptor.compiled()


def mutated(change):
    files = descriptor_pb2.FileDescriptorSet.FromString(SOURCE)
    change(files)
    return files.SerializeToString()


def find(items, name):
    return next(item for item in items if item.name == name)


def message(files, name):
    return find([m for file in files.file for m in file.message_type], name)


def method(files, name):
    return find([m for file in files.file for service in file.service for m in service.method], name)


def reason(files):
    return find([e for file in files.file for e in file.enum_type], "Reason")


def set_attributes(item, **values):
    for key, value in values.items():
        setattr(item, key, value)


def oneof_left(files):
    find(message(files, "SessionUp").field, "heartbeat").ClearField("oneof_index")


def map_value_changed(files):
    entry = find(message(files, "Prepare").nested_type, "SourceParticipantsEntry")
    entry.field[1].type = descriptor.Field.TYPE_UINT64


def nested_number_changed(files):
    find(find(message(files, "SlicePart").nested_type, "Header").field, "rank").number = 9


BREAKS = {
    "a field's number": lambda f: set_attributes(find(message(f, "Member").field, "participant"), number=7),
    "a nested field's number": nested_number_changed,
    "a field's type": lambda f: set_attributes(find(message(f, "Member").field, "incarnation"),
                                               type=descriptor.Field.TYPE_UINT64),
    "a field's label": lambda f: set_attributes(find(message(f, "Leg").field, "plan"),
                                                label=descriptor.Field.LABEL_REPEATED),
    "a field's message": lambda f: set_attributes(find(message(f, "Leg").field, "plan"),
                                                  type_name=".weightwire.v1.Member"),
    "a field's oneof": oneof_left,
    "a map's value": map_value_changed,
    "a field gone": lambda f: message(f, "Piece").field.pop(),
    "an enum value's number": lambda f: set_attributes(find(reason(f).value, "REASON_IO_ERROR"), number=99),
    "an enum value gone": lambda f: reason(f).value.pop(),
    "an rpc's request": lambda f: set_attributes(method(f, "Commit"), input_type=".weightwire.v1.AbortRequest"),
    "an rpc's streaming": lambda f: set_attributes(method(f, "Watch"), server_streaming=False),
    "an rpc's name": lambda f: set_attributes(method(f, "Evict"), name="Fence"),
}


def new_field(files):
    message(files, "Member").field.add(name="zone", number=3, type=descriptor.Field.TYPE_STRING,
                                       label=descriptor.Field.LABEL_OPTIONAL)


def run(descriptor_set, record, *flags):
    path = record.with_suffix(".pb")
    path.write_bytes(descriptor_set)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = descriptor.main([*flags, "--descriptor-set", str(path), "--record", str(record)])
    return code, out.getvalue()


def check(wrong, what, fact):
    if not fact:
        wrong.append(what)


def main():
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        record = pathlib.Path(folder) / "contract.txt"
        check(wrong, "an empty record takes everything", run(SOURCE, record, "--update")[0] == 0)
        contract = record.read_text()
        check(wrong, "the unchanged contract passes", run(SOURCE, record)[0] == 0)
        for name, change in BREAKS.items():
            broken = mutated(change)
            code, text = run(broken, record)
            check(wrong, f"{name}: compared", code == 1 and ("changed" in text or "vanished" in text))
            check(wrong, f"{name}: --update", run(broken, record, "--update")[0] == 1)
            check(wrong, f"{name}: the record stays", record.read_text() == contract)
        fresh = mutated(new_field)
        code, text = run(fresh, record)
        check(wrong, "a new field is named", code == 1 and "new       + weightwire.v1.Member.zone = 3" in text)
        check(wrong, "a new field is taken", run(fresh, record, "--update")[0] == 0)
        check(wrong, "a new field is on record", run(fresh, record)[0] == 0)
    print("\n".join(f"FAILED: {line}" for line in wrong) or f"{len(BREAKS)} kinds of break are refused")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
