#include "client/cli/offline.h"

#include <fnmatch.h>

#include <cstdio>
#include <fstream>

#include "client/cli/spec_file.h"
#include "server/layout/scheme.h"

namespace weightwire::cli {

Result<std::string> ReadFile(const std::string& path, const std::string& remedy) {
  std::ifstream file(path, std::ios::binary);
  const bool open = file.is_open();
  std::string text;
  std::vector<char> chunk(1 << 20);
  while (file) {
    file.read(chunk.data(), static_cast<std::streamsize>(chunk.size()));
    text.append(chunk.data(), static_cast<size_t>(file.gcount()));
  }
  if (!open || file.bad()) {  // a folder can be opened, not read
    return Fail(Status(Code::kInvalidArgument, Reason::kIoError, "cannot read '" + path + "'")
                    .Remedy(remedy));
  }
  return text;
}

Status WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (file) return OkStatus();
  return Status(Code::kInvalidArgument, Reason::kIoError, "cannot write '" + path + "'")
      .Remedy("is there such a folder, and is there room?");
}

Result<std::string> ReadConfig(const std::string& path) {
  WW_ASSIGN(std::string config, ReadFile(path, "--config takes the path of a model's config.json"));
  const auto notes = layout::NotesOfConfig(config);  // what is wrong is said by who uses it
  for (const std::string& note : notes.value_or(std::vector<std::string>())) {
    std::fprintf(stderr, "note: %s\n", note.c_str());
  }
  return config;
}

Result<layout::ModelLayout> LayoutOf(const std::string& config, const std::string& spec) {
  std::string text = spec;
  if (IsSpecFile(spec)) {
    WW_ASSIGN(text, SpecFromFile(spec));
  }
  WW_ASSIGN(const layout::ParallelSpec parsed, layout::ParseParallelSpec(text));
  return layout::LayoutFromScheme(config, parsed);
}

std::string RanksText(const std::vector<uint32_t>& ranks) {
  std::string text;
  for (size_t first = 0; first < ranks.size();) {
    size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (!text.empty()) text += ", ";
    text += std::to_string(ranks[first]);
    if (last > first) text.append("-").append(std::to_string(ranks[last]));
    first = last + 1;
  }
  return text;
}

bool Matches(const std::string& pattern, const std::string& text) {
  return pattern.empty() || fnmatch(pattern.c_str(), text.c_str(), 0) == 0;
}

}  // namespace weightwire::cli
