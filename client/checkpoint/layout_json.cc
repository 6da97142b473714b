#include "client/checkpoint/layout_json.h"

namespace weightwire::checkpoint {

Json SpecJson(uint32_t rank, const layout::LocalTensor& tensor) {
  return {{"rank", rank},
          {"name", tensor.name},
          {"dtype", std::string(layout::DTypeName(tensor.dtype))},
          {"shape", tensor.shape}};
}

Json TensorJson(const layout::ModelLayout& layout, uint32_t rank,
                const layout::LocalTensor& tensor) {
  Json pieces = Json::array();
  for (const layout::Piece& piece : tensor.pieces) {
    pieces.push_back({{"tensor", layout.canonical.tensors[piece.tensor].name},
                      {"begin", piece.box.begin},
                      {"extent", piece.box.extent},
                      {"local_offset", piece.local_offset},
                      {"local_stride", piece.local_stride}});
  }
  Json json = SpecJson(rank, tensor);
  json["pieces"] = std::move(pieces);
  return json;
}

}  // namespace weightwire::checkpoint
