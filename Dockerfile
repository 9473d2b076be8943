# The image has the program, links with the names of the sidecars and of topolvm-controller to it, CA certificates
# and licences, but no shell and no libraries. Build it from the root of the repository:
#
#   docker build --build-arg VERSION="$(git describe --tags --always)" \
#     --build-arg SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)" -t storage-controller:dev .
#
# --target=csi-provisioner, csi-attacher, csi-resizer, csi-snapshotter or livenessprobe builds an image
# that replaces the image of that sidecar in a manifest, without any other change.
#
# Builds are reproducible: the program contains no paths, times or commits (-trimpath,
# -buildvcs=false). SOURCE_DATE_EPOCH sets the times of the files and the image.
FROM --platform=$BUILDPLATFORM golang:1.26.8@sha256:3c3e25a4da13fd0478eed2df1eb35a0e667094a7124d3993a6a1d30f71c17e79 AS build
# BuildKit sets these. A default would hide its value; if empty, Go builds for the platform of the builder.
ARG TARGETOS
ARG TARGETARCH
ARG VERSION=dev
ARG SOURCE_DATE_EPOCH=0
# v1.0.0 is the certified Go Cryptographic Module, in FIPS mode.
ARG GOFIPS140=off
WORKDIR /src
COPY go.mod go.sum ./
COPY release/go.mod release/go.sum release/
RUN go mod download && go -C release mod download
COPY . .
RUN CGO_ENABLED=0 GOFLAGS= GOFIPS140=$GOFIPS140 GOOS=$TARGETOS GOARCH=$TARGETARCH go build -trimpath -buildvcs=false -tags grpcnotrace -ldflags "-s -w -buildid= -X main.version=$VERSION" -o /out/storage-controller ./cmd/storage-controller
RUN mkdir -p /out/etc/ssl/certs \
 && cp /etc/ssl/certs/ca-certificates.crt /out/etc/ssl/certs/ca-certificates.crt \
 && cp LICENSE /out/LICENSE \
 && CGO_ENABLED=0 go -C release run . licences /out/storage-controller > /out/THIRD_PARTY_LICENSES \
 && ln -s storage-controller /out/csi-provisioner \
 && ln -s storage-controller /out/csi-attacher \
 && ln -s storage-controller /out/csi-resizer \
 && ln -s storage-controller /out/csi-snapshotter \
 && ln -s storage-controller /out/livenessprobe \
 && ln -s storage-controller /out/topolvm-controller \
 && find /out -exec touch --no-dereference --date=@$SOURCE_DATE_EPOCH {} +

FROM scratch AS files
COPY --from=build /out/ /

# The images of the sidecars run as root, which usually owns the socket of the driver.
FROM files AS csi-provisioner
USER 0:0
ENTRYPOINT ["/csi-provisioner"]

FROM files AS csi-attacher
USER 0:0
ENTRYPOINT ["/csi-attacher"]

FROM files AS csi-resizer
USER 0:0
ENTRYPOINT ["/csi-resizer"]

FROM files AS csi-snapshotter
USER 0:0
ENTRYPOINT ["/csi-snapshotter"]

FROM files AS livenessprobe
USER 0:0
ENTRYPOINT ["/livenessprobe"]

FROM files AS storage-controller
# A number, because runAsNonRoot cannot resolve names.
USER 65532:65532
ENTRYPOINT ["/storage-controller"]
