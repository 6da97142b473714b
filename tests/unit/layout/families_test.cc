// What transformers saves of a tiny model of each family (tests/golden/families.py) is what the
// `hf` layout holds.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <ostream>

#include "server/layout/families/family.h"
#include "server/layout/scheme.h"
#include "tests/support/safetensors.h"

namespace weightwire::layout {
namespace {

using testing::ReadText;

/// By name: dtype and shape.
using Tensors = std::map<std::string, std::pair<std::string, Shape>>;

std::string Folder() { return testing::SourceDir() + "/tests/data/transformers"; }

std::vector<std::string> Listings() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(Folder())) {
    names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// transformers casts this buffer with the model; releases keep it in fp32, and so do families.
std::string DTypeOf(const std::string& name, std::string dtype) {
  return name.ends_with("e_score_correction_bias") ? "F32" : dtype;
}

Tensors Stored(const nlohmann::json& listing) {
  Tensors tensors;
  for (const auto& [name, value] : listing.at("tensors").items()) {
    tensors[name] = {DTypeOf(name, value.at(0)), value.at(1).get<Shape>()};
  }
  return tensors;
}

/// One line for each name that only one side has or whose shape or dtype differ.
std::string Differences(const Tensors& derived, const Tensors& stored) {
  const auto text = [](const Tensors& tensors, const std::string& name) {
    const auto it = tensors.find(name);
    return it == tensors.end() ? "nothing" : ::testing::PrintToString(it->second);
  };
  std::string lines;
  Tensors all = derived;
  all.insert(stored.begin(), stored.end());
  for (const auto& entry : all) {
    const std::string ours = text(derived, entry.first);
    const std::string theirs = text(stored, entry.first);
    if (ours != theirs) {
      lines.append(entry.first).append(": derived ").append(ours);
      lines.append(", transformers ").append(theirs).append("\n");
    }
  }
  return lines;
}

/// What the `hf` layout and transformers disagree on; empty: nothing.
std::string DifferencesOf(const nlohmann::json& listing) {
  const auto layout =
      LayoutFromScheme(listing.at("config").dump(), *ParseParallelSpec("hf:mtp=none"));
  if (!layout) return layout.error().ToString();
  if (const Status valid = Validate(*layout); !valid.ok()) return valid.ToString();
  Tensors derived;
  for (const LocalTensor& tensor : layout->ranks.at(0).tensors) {
    derived[tensor.name] = {std::string(DTypeName(tensor.dtype)), tensor.shape};
  }
  return Differences(derived, Stored(listing));
}

TEST(FamilyListings, HfLayoutIsWhatTransformersSaves) {
  for (const std::string& name : Listings()) {
    const auto listing = nlohmann::json::parse(ReadText(Folder() + "/" + name + ".json"));
    EXPECT_EQ(DifferencesOf(listing), "") << name;
  }
}

TEST(FamilyListings, EveryFamilyHasOne) {
  const std::vector<std::string> listings = Listings();
  for (const Family& family : Families()) {
    const std::string begin = std::string(family.model_type) + "-";
    EXPECT_TRUE(std::any_of(listings.begin(), listings.end(),
                            [&](const std::string& name) { return name.starts_with(begin); }))
        << "add a variant of " << family.model_type << " to tests/golden/families.py";
  }
}

}  // namespace
}  // namespace weightwire::layout
