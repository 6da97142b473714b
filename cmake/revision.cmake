# cmake -DSOURCE=… -DTEMPLATE=… -DOUTPUT=… -DGIVEN=… -P revision.cmake: writes what this is built from, if it is another than
# before. GIVEN wins; without a repository (an image) the environment's WEIGHTWIRE_REVISION says it.
set(REVISION "${GIVEN}")
if(REVISION STREQUAL "")
  # No lock: whoever works in the clone meanwhile is not disturbed.
  set(ENV{GIT_OPTIONAL_LOCKS} 0)
  execute_process(COMMAND git -C "${SOURCE}" describe --always --dirty --abbrev=12 --exclude=*
                  OUTPUT_VARIABLE REVISION OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(failed OR NOT EXISTS "${SOURCE}/.git")
    set(REVISION "$ENV{WEIGHTWIRE_REVISION}")
  endif()
  if(REVISION STREQUAL "")
    set(REVISION "unknown")
  endif()
endif()
configure_file("${TEMPLATE}" "${OUTPUT}" @ONLY)
